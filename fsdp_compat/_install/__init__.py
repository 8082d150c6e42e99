"""``install()``: programs written for torch.distributed.fsdp run on fsdp_compat.

contents         every module of torch.distributed.fsdp that clients use, and its names
private_names    what torch's private modules offered, in terms of ours
modules          module objects in sys.modules, and names that other modules had imported before
refusals         what cannot be replaced any more
torch_internals  parts of torch that compare classes
client_fixes     defects of clients that make results wrong
log              FSDP_COMPAT_LOG=install
"""

from __future__ import annotations

import threading

from . import client_fixes, log, torch_internals
from .modules import Modules
from .refusals import require_replaceable, require_supported_torch

_lock = threading.RLock()
_installed: Modules | None = None


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
            for each in torch_internals.PATCHES:
                each.patch()
            _installed = modules
        if fix_clients:
            for each in client_fixes.PATCHES:
                each.patch()


def uninstall() -> None:
    """Undo ``install()``: modules and names are torch's again, also the names that were imported
    while it was in effect. Models that were wrapped stay as they are. Without ``install()`` it does
    nothing."""
    global _installed
    with _lock:
        if _installed is None:
            return
        for each in (*client_fixes.PATCHES, *torch_internals.PATCHES):
            each.undo()
        _installed.remove()
        _installed = None
