"""Shard the training of large PyTorch models, with the API of torch.distributed.fsdp.

Training
    FullyShardedDataParallel    wrap a model (FSDP1); `wrap` has policies for its units
    fully_shard                 shard modules in place (FSDP2)
    ShardedGradScaler           scale losses for float16
    optim                       optimizers that need whole parameters, averages, gradient norms

Before and after training
    plan                        memory and traffic of a step, without a GPU or a process group
    describe                    how a model is sharded
    checkpoint                  save, load, inspect and convert checkpoints
    install, uninstall          run code that imports torch.distributed.fsdp on this package

The other names are configurations, enums and results. Most have torch's names and meaning. All
errors derive from FsdpCompatError. ``help(name)`` describes a name; examples/API.md in the source
repository lists all of them. The command fsdp-compat has --help."""

import pkgutil
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ._version import __version__ as __version__

if TYPE_CHECKING:
    from . import api as api
    from . import checkpoint as checkpoint
    from . import errors as errors
    from . import fully_sharded_data_parallel as fully_sharded_data_parallel
    from . import optim as optim
    from . import sharded_grad_scaler as sharded_grad_scaler
    from . import wrap as wrap
    from ._public import *  # noqa: F403
    from ._public import __all__ as __all__
else:

    def __getattr__(name: str) -> object:
        if name.isidentifier() and find_spec(f"{__name__}.{name}"):
            return import_module(f"{__name__}.{name}")
        is_private = name.startswith("_") and name != "__all__"
        public = None if is_private else import_module(f"{__name__}._public")
        if public is None or not hasattr(public, name):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return globals().setdefault(name, getattr(public, name))

    def __dir__() -> list[str]:
        modules = [x.name for x in pkgutil.iter_modules(__path__) if x.name[0] != "_"]  # noqa: F405
        return sorted(["__version__", *modules, *__getattr__("__all__")])
