"""``install()``: programs written for torch.distributed.fsdp run on fsdp_compat.

What stands where:

    contents.py         every module of torch.distributed.fsdp that clients use, and its names
    private_names.py    what torch's private modules offered, in terms of ours
    modules.py          module objects that stand in sys.modules, and torch's own beneath them
    rebinding.py        names that other modules had imported before
    refusals.py         what cannot be replaced any more
    torch_internals.py  parts of torch that compare classes
    client_fixes.py     defects of clients that make results wrong
    log.py              FSDP_COMPAT_LOG=install
"""

from __future__ import annotations

import threading

from . import client_fixes, log, torch_internals
from .modules import Modules
from .rebinding import Rebinding
from .refusals import require_replaceable, require_supported_torch

_lock = threading.RLock()
_installed: tuple[Modules, Rebinding] | None = None


def install(*, fix_clients: bool = True) -> None:
    """Make every use of ``torch.distributed.fsdp`` in this process resolve to fsdp_compat,
    including names that other modules have already imported. Works even if this torch no longer
    has FSDP1. A second call does nothing.

    fix_clients: also fix known bugs of PEFT and Accelerate that make results wrong with any FSDP1,
    in the affected versions only. A later call may enable it.

    With the environment variable ``FSDP_COMPAT_LOG=install`` it is logged (logger
    "fsdp_compat.install", on stderr) what is replaced, and which private names a program reads.

    Raises StateError, with nothing changed, if a class was already derived from torch's
    FullyShardedDataParallel, if a model is already sharded by torch, or if this torch is too old.
    Warns of classes derived from other classes of torch's FSDP. Process groups may exist already.
    """
    global _installed
    with _lock:
        if _installed is None:
            require_supported_torch()
            log.begin()
            modules = Modules()
            require_replaceable(modules.replaced)
            modules.put()
            rebinding = Rebinding(modules)
            rebinding.put()
            torch_internals.patch(modules)
            _installed = modules, rebinding
        if fix_clients:
            client_fixes.patch()


def uninstall() -> None:
    """Undo ``install()``: modules and names are torch's again, also the names that were imported
    while it was in effect. Models that were wrapped stay as they are. Without ``install()`` it does
    nothing."""
    global _installed
    with _lock:
        if _installed is None:
            return
        modules, rebinding = _installed
        client_fixes.undo()
        torch_internals.undo()
        modules.remove()
        rebinding.undo()
        _installed = None


def is_installed() -> bool:
    """Return whether ``torch.distributed.fsdp`` is fsdp_compat's now."""
    return _installed is not None
