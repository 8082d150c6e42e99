"""``install()``: programs written for torch.distributed.fsdp run on fsdp_compat."""

from __future__ import annotations

import threading

from .. import _torch_patches
from . import client_fixes, log, torch_internals
from .install_checks import require_replaceable, require_supported_torch
from .modules import Modules

_lock = threading.RLock()
_installed: Modules | None = None


def install(*, fix_clients: bool = True) -> None:
    """Make every use of ``torch.distributed.fsdp`` in this process resolve to fsdp_compat.

    Names that other modules have already imported are included. Works even if this torch no longer
    has FSDP1. A second call does nothing. Where a program keeps torch's wrapper or ``fully_shard``
    otherwise, as in a partial or a class, it builds ours, and the first call warns. Warns, too,
    about classes derived from other classes of torch's FSDP.

    The environment variable ``FSDP_COMPAT_LOG=install`` logs (logger "fsdp_compat.install", on
    stderr) replacements and the private names that a program reads.

    Args:
        fix_clients: fix known bugs of PEFT and Accelerate that make results wrong with any FSDP1,
            as the first use of a name of fsdp_compat does. False reverts that; a later call may
            enable it.

    Raises:
        StateError: with nothing changed: a class was already derived from torch's
            FullyShardedDataParallel, a model is already sharded by torch, or this torch is too old.
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
        for each in client_fixes.PATCHES:
            (each.patch if fix_clients else each.undo)()


def uninstall() -> None:
    """Undo all that fsdp_compat has changed in the process.

    That is ``install()``, the fixes of clients, and the patches of torch that wrapping or sharding
    a model has made. For tests, and for programs that train with plain torch later. Models that are
    sharded already then lack the patches: torch.nn.utils.clip_grad_norm_, for example, sees only
    this rank's shards. Sharding another model makes them again. Modules that had imported names of
    torch.distributed.fsdp before ``install()``, and torch's own, get torch's back. Names that other
    modules have imported since stay fsdp_compat's, like those imported from fsdp_compat."""
    global _installed
    with _lock:
        for each in (*client_fixes.PATCHES, *torch_internals.PATCHES):
            each.undo()
        if _installed is not None:
            _installed.remove()
            _installed = None
        _torch_patches.undo()


for _fix in client_fixes.PATCHES:
    _fix.patch()
