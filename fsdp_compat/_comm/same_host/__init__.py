"""Ranks of one host, which read each other's messages in place.

    transport       the transport: messages are described in counters and read where they lie
    peers           how the ranks of an axis find and read each other's memory
    counters        how far each rank has come, and what it has sent last
    mapping         all ranks' shards side by side in the addresses of one process
    shared_memory   tensors in memory that peers can read
    arena           this process's memory: blocks in a few large files
    memory_files    files without a name, and mappings of them

Nothing outside needs this folder but ``_comm/communicator.py``, which chooses the transport."""
