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
        is_private = name.startswith("_") and name != "__all__"
        public = None if is_private else import_module(f"{__name__}._public")
        if not hasattr(public, name):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(public, name)
        return value

    def __dir__() -> list[str]:
        return __getattr__("__all__")

    def _is_command() -> bool:
        """True while the command imports the package, also as ``python -m``."""
        program, given = sys.argv[0] if sys.argv else "", sys.orig_argv
        if program == "-m" and "-m" in given:
            return given[given.index("-m") + 1] == __name__
        return Path(program).name.startswith("fsdp-compat")

    if not _is_command():
        import_module(f"{__name__}._public")
