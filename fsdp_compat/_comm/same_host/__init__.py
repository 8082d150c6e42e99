"""Ranks of one host, which read each other's messages in place.

    transport       the transport: messages are described in counters and read where they lie
    peers           how the ranks of an axis find, read and map each other's memory
    counters        how far each rank has come, and what it has sent last
    shared_memory   tensors in memory that peers can read: blocks in a few large files
    memory_files    files without a name, and mappings of them

Nothing outside needs this folder but ``_comm/communicator.py``, which chooses the transport."""
