"""``python -m fsdp_compat migrate``: rewrite source that uses torch's FSDP, or DDP.

    command       arguments, files, the order of the steps; the only file that ``__main__`` imports
    source        a parsed file: what names stand for, edits that are made all at once
    fsdp_imports  imports of torch.distributed.fsdp, and which of its names exist here
    new_imports   names that rewritten code needs, and imports that it no longer needs
    wrap_calls    DistributedDataParallel(...) becomes FullyShardedDataParallel(...)
    uses          what a function does with a model that it wraps, and what is reported elsewhere

Nothing here imports torch, or the rest of the package."""
