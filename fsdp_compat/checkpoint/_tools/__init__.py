"""What one process does with the files of checkpoints, see `checkpoint.files`.

``convert``, ``run_listing``, and with ``arithmetic`` ``inspection``, ``verification`` and
``difference``; from a shell ``commands``, with ``tables``."""
