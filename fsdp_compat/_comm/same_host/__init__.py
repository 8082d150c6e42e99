"""Ranks of one host, which read each other's messages in place. Only ``_comm/communicator.py``,
which chooses the transport, imports this folder."""
