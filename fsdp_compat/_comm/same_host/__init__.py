"""Ranks of one host, which read each other's messages in place.

    transport       the transport: counters describe messages, which are read where they lie
    peers           how the ranks of an axis find, read and map each other's memory
    counters        how far each rank has come, and what it sent last
    shared_memory   tensors in memory that peers can read: blocks in a few large files
    memory_files    anonymous files in memory, and mappings of them

Only ``_comm/communicator.py``, which chooses the transport, imports this folder."""
