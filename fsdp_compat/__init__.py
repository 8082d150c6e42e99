"""FullyShardedDataParallel and fully_shard with the API of torch.distributed.fsdp, on any device
that torch.distributed supports.

The names come from `_public`, which is imported at once, but by the command fsdp-compat only when
the first is used: its ``--help`` needs no torch."""

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from ._version import __version__ as __version__

if TYPE_CHECKING:
    from ._public import *  # noqa: F403
    from ._public import __all__ as __all__
else:

    def __getattr__(name: str) -> object:
        if find_spec(f"{__name__}.{name}"):
            return import_module(f"{__name__}.{name}")
        if name.startswith("_") and name != "__all__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f"{__name__}._public"), name)
        return value

    def __dir__() -> list[str]:
        return __getattr__("__all__")

    if not {"fsdp-compat", "fsdp_compat"} & {Path(each).name for each in sys.orig_argv}:
        import_module(f"{__name__}._public")
