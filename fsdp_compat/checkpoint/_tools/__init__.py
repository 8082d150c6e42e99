"""Checkpoints of any format, in one process, without a process group, a GPU or a model.

A reader makes an `archive`: names, dtypes, shapes, and boxes with the bytes that hold them. Values
are read when they are needed, through a buffer of bounded size, and their checksums are compared
first if the format has any. Nothing that a file holds is run.

Files are not trusted. Bounded before any work, whatever a small file says: bytes of text and of
pickles; the depth and the number of nested values, also by references; shapes (64 dims, 2**60
elements); the sizes of a mesh; the boxes that the placements of a DTensor cut it into. Not bounded:
what ``pickle.Unpickler`` or ``json`` needs for a crafted input, see `pickles`.

- ``archive``: what a checkpoint holds; ``tree``, ``optimizer_tree``: the sections of the nested
  values that a reader returns
- ``recognition``: which kind it is; ``paths``: names from untrusted files
- ``reader``: the values; ``writers``: what writers share; ``threads``: work on many tensors;
  ``walk``: nested values

Readers and writers, by format:

- native: ``native``; safetensors: ``safetensors_files``; torch.save: ``torch_save``, on ``pickles``
- several files of torch.save: ``rank_files``, ``rank_merge``, ``sharded_records``; flat parameters
  of FSDP1: ``flat_files``
- torch.distributed.checkpoint: ``dcp``; directories of Accelerate, Lightning and others:
  ``client_directories``

What users call, as `checkpoint.files`: ``convert``, ``run_listing``, and with ``arithmetic``
``inspection``, ``verification`` and ``difference``; from a shell ``commands``, with ``tables``."""
