"""``python -m fsdp_compat migrate``: rewrite source that uses torch's FSDP, or DDP.

    command          arguments, exit codes; the only file that ``__main__`` imports
    files            which files are meant; reading and writing them without changing their form
    findings         what was left alone, and why
    report           the diff, the list and the summary
    rewriting        one text in, one text out: the order of the steps below
    source           a parsed file: where names come from, edits that are made all at once
    names            which names of torch.distributed.fsdp exist here
    fsdp_imports     imports of torch.distributed.fsdp
    new_imports      names that rewritten code needs, and imports that it no longer needs
    places           variables that hold a wrapped model, the module in it, or its optimizer
    bindings         every assignment of a variable
    wrapping         DistributedDataParallel(...) becomes FullyShardedDataParallel(...)
    optimizers       optimizers that were made before wrapping; loading their state
    guards           code that runs on some ranks only
    state            saving and loading
    uses             clipping, scalers, ``model.module``, isinstance, what FSDP does not have

The files from ``rewriting`` on need libcst, which only ``command`` looks for, when it is called."""
