"""Formats of checkpoints: a reader makes an `Archive` of paths, whose nested values `tree` divides.

Values are read when they are needed, and their checksums are compared first if the format has any.
Nothing that a file holds is run.

Files are not trusted. Bounded before any work, whatever a small file says: bytes of text and of
pickles; the depth and the number of nested values, also by references; shapes (64 dims, 2**60
elements); the sizes of a mesh; the boxes that the placements of a DTensor cut it into. Not bounded:
what ``pickle.Unpickler`` or ``json`` needs for a crafted input, see `pickles`.

- ``recognition``: which kind it is; ``paths``: names from untrusted files; ``writers``: what they
  share; ``tree``, ``optimizer_tree``: the sections of nested values
- native: ``manifest``, ``native``; safetensors: ``safetensors_files``; torch.save:
  ``torch_save``, on ``pickles``
- several files of torch.save: ``rank_files``, ``sharded_records``; flat parameters of FSDP1:
  ``flat_files``
- torch.distributed.checkpoint: ``dcp``; directories of Accelerate, Lightning and others:
  ``client_directories``"""
