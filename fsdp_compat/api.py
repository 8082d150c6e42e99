"""The enums and plain configuration objects that `FullyShardedDataParallel` takes, under torch's
names.

Members, fields and defaults equal those of `torch.distributed.fsdp.api`; what they mean is written
here. Torch's own objects are welcome too: `as_ours` turns each of them into the equal object of
this module."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from fsdp_compat.errors import UsageError, explain

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "OptimStateDictConfig",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
]

_T = TypeVar("_T")

_BATCH_NORM: type[nn.Module] = nn.BatchNorm1d.__bases__[
    0
]  # what BatchNorm1d, 2d, 3d and SyncBatchNorm have in common
_PACKAGE = __name__.partition(".")[0]
_TORCH_FSDP = "torch.distributed.fsdp"


class ShardingStrategy(enum.Enum):
    """What the ranks share out among themselves, and whether full parameters survive between
    forward and backward.

    ====================  ======================  ==========  ===============================
    member                split over              copies      full parameters after forward
    ====================  ======================  ==========  ===============================
    FULL_SHARD            all ranks               1           freed, gathered again
    SHARD_GRAD_OP         all ranks               1           kept until backward is done
    NO_SHARD              nothing is split        all ranks   always there, as with DDP
    HYBRID_SHARD          the ranks of one node   the nodes   freed, gathered again
    _HYBRID_SHARD_ZERO2   the ranks of one node   the nodes   kept until backward is done
    ====================  ======================  ==========  ===============================

    Gradients and optimizer state are split in the same way as the parameters. With a device mesh of
    two axes (replica, shard), or two process groups, the hybrid strategies split over that mesh
    instead of over nodes.
    """

    FULL_SHARD = enum.auto()
    SHARD_GRAD_OP = enum.auto()
    NO_SHARD = enum.auto()
    HYBRID_SHARD = enum.auto()
    _HYBRID_SHARD_ZERO2 = enum.auto()


class BackwardPrefetch(enum.Enum):
    """When, in backward, the gather of the unit that comes next is started; None in its place
    means: when it is needed.

    BACKWARD_PRE   before the gradients of the current unit are computed: hides the gather best,
    holds two full units BACKWARD_POST  after them: the current unit is freed first, so that one
    full unit less is held at the peak
    """

    BACKWARD_PRE = enum.auto()
    BACKWARD_POST = enum.auto()


@dataclass
class MixedPrecision:
    """The dtypes of computation, of gradient reduction and of buffers; the shards keep the dtype of
    the user's model.

    Only floating point tensors of 16 bits and more are cast. The optimizer and checkpoints see the
    shards, so they stay in the original dtype. Modules of a class in `_module_classes_to_ignore`
    become units of their own without mixed precision, with or without a wrap policy; what they are
    given is cast to their own dtype, and what they return back. With the environment variable
    FSDP_USE_FULL_PREC_IN_EVAL=1, modules in evaluation mode compute in the original dtype.

    Attributes:
        param_dtype: dtype of the full parameters in forward and backward; None (default) keeps the
            original one.
        reduce_dtype: dtype in which gradients travel and are summed; None (default) means
            `param_dtype`.
        buffer_dtype: dtype to which buffers are cast, once, before the first forward; None
            (default) leaves them. State dicts hold them in their original dtype, with exact values
            where nothing has been written since.
        keep_low_precision_grads: whether `.grad` is left in the dtype of the reduction rather than
            cast to the dtype of the shard. Default False.
        cast_forward_inputs: whether each unit casts the inputs of its forward to `param_dtype`.
            Default False.
        cast_root_forward_inputs: whether the outermost unit does so, whatever `cast_forward_inputs`
            says. Default True.
        _module_classes_to_ignore: classes that are left out of mixed precision. Default: the common
            base of all batch norms.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    cast_forward_inputs: bool = False
    cast_root_forward_inputs: bool = True
    _module_classes_to_ignore: Sequence[type[nn.Module]] = (_BATCH_NORM,)


@dataclass
class CPUOffload:
    """Where the shards live while they are not computed with.

    Attributes:
        offload_params: whether shards, and with them their gradients and the optimizer step, are
            kept on the CPU. Default False.
    """

    offload_params: bool = False


class StateDictType(enum.Enum):
    """What `state_dict` and `load_state_dict` hold for each parameter of a wrapped model.

    FULL_STATE_DICT     the whole tensor under its original name, as the model before wrapping would
    give it LOCAL_STATE_DICT    this rank's part of the flat parameter, readable only with the same
    wrapping and ranks SHARDED_STATE_DICT  this rank's part of each original parameter, under its
    original name, for any number of ranks
    """

    FULL_STATE_DICT = enum.auto()
    LOCAL_STATE_DICT = enum.auto()
    SHARDED_STATE_DICT = enum.auto()


@dataclass
class StateDictConfig:
    """What every kind of model state dict can be told; use the class that belongs to the
    `StateDictType`.

    Attributes:
        offload_to_cpu: whether the returned tensors are moved to the CPU. Default False: they stay
            on their device.
    """

    offload_to_cpu: bool = False


@dataclass
class OptimStateDictConfig:
    """What every kind of optimizer state dict can be told; use the class that belongs to the
    `StateDictType`.

    Attributes:
        offload_to_cpu: whether the returned state tensors are moved to the CPU. Default True, other
            than for models.
    """

    offload_to_cpu: bool = True


@dataclass
class FullStateDictConfig(StateDictConfig):
    """For `StateDictType.FULL_STATE_DICT`.

    Attributes:
        rank0_only: whether only rank 0 gets the tensors, all others an empty dict. Default False:
            every rank gets them. For saving a large model set it, and `offload_to_cpu` too.
    """

    rank0_only: bool = False


@dataclass
class FullOptimStateDictConfig(OptimStateDictConfig):
    """For `StateDictType.FULL_STATE_DICT`.

    Attributes:
        rank0_only: whether only rank 0 gets the state, all others an empty dict. Default False:
            every rank gets it.
    """

    rank0_only: bool = False


@dataclass
class ShardedStateDictConfig(StateDictConfig):
    """For `StateDictType.SHARDED_STATE_DICT`.

    Attributes:
        _use_dtensor: whether values are `DTensor` rather than `ShardedTensor`. Default False; a
            model that was given a device mesh sets it.
    """

    _use_dtensor: bool = False


@dataclass
class ShardedOptimStateDictConfig(OptimStateDictConfig):
    """For `StateDictType.SHARDED_STATE_DICT`.

    Attributes:
        _use_dtensor: whether values are `DTensor` rather than `ShardedTensor`. Default False; a
            model that was given a device mesh sets it.
    """

    _use_dtensor: bool = False


@dataclass
class LocalStateDictConfig(StateDictConfig):
    """For `StateDictType.LOCAL_STATE_DICT`; nothing beyond what every kind has."""


@dataclass
class LocalOptimStateDictConfig(OptimStateDictConfig):
    """For `StateDictType.LOCAL_STATE_DICT`.

    Attributes:
        offload_to_cpu: whether the returned state tensors are moved to the CPU. Default False here.
    """

    offload_to_cpu: bool = False


@dataclass
class StateDictSettings:
    """The three things that decide what a state dict of a model and of its optimizer looks like.

    Attributes:
        state_dict_type: the kind of both state dicts.
        state_dict_config: the settings for the model; of the class that belongs to the kind.
        optim_state_dict_config: the settings for the optimizer; of the class that belongs to the
            kind.
    """

    state_dict_type: StateDictType
    state_dict_config: StateDictConfig
    optim_state_dict_config: OptimStateDictConfig


def as_ours(value: object, expected: type[_T], argument_name: str) -> _T | None:
    """Return ``value`` as an instance of ``expected``, translating torch's equal object if it is
    one.

    None and instances of ``expected`` come back as they are. An object of a class of torch's FSDP
    is recognised by the name and the module of its class, without importing that module, and
    becomes the object of ours with the same member name or field values; this goes through nested
    settings too. ``expected`` is any enum or dataclass of this package, also one from another
    module, and the result may be of a subclass of it that this package defines.

    Raises:
        UsageError: ``value`` is neither, or holds something that ours cannot say; ``argument_name``
            is named.
    """
    if value is None:
        return None
    ours = _translated(value, expected, argument_name)
    if isinstance(ours, expected):
        return ours
    raise UsageError(
        explain(
            f"{argument_name} has the wrong type.",
            expected=f"{_full_name(expected)}, torch's class of that name, or None",
            got=f"{value!r} of type {_full_name(type(value))}",
            where=f"argument {argument_name!r}",
            fix=_how_to_write(expected),
        )
    )


def _translated(value: Any, expected: type, argument_name: str) -> Any:
    """Return the equal object of ours if ``value`` is an enum member or dataclass of torch's FSDP,
    else ``value``."""
    torch_class: Any = next((cls for cls in type(value).__mro__ if _is_of_torch_fsdp(cls)), None)
    if torch_class is None:
        return value
    our_class = next(
        (cls for cls in _candidates(expected) if cls.__name__ == torch_class.__name__), None
    )
    if our_class is None:
        return value
    if issubclass(our_class, enum.Enum):
        if value.name not in our_class.__members__:
            raise _cannot_say(f"{torch_class.__name__}.{value.name}", our_class, argument_name)
        return our_class[value.name]
    our_fields = {field.name for field in dataclasses.fields(our_class)}
    given = {field.name: getattr(value, field.name) for field in dataclasses.fields(torch_class)}
    for field in dataclasses.fields(torch_class):
        if field.name not in our_fields and given[field.name] != field.default:
            raise _cannot_say(
                f"{torch_class.__name__}({field.name}={given[field.name]!r})",
                our_class,
                argument_name,
            )
    return our_class(
        **{
            name: _translated(given[name], our_class, argument_name)
            for name in our_fields & given.keys()
        }
    )


def _is_of_torch_fsdp(cls: type) -> bool:
    return cls.__module__ == _TORCH_FSDP or cls.__module__.startswith(_TORCH_FSDP + ".")


def _candidates(expected: type) -> Iterator[Any]:
    """Yield ``expected``, the subclasses of it that this package defines, and the public classes of
    this module."""
    family: list[type] = [expected]
    while family:
        cls = family.pop()
        children: list[type] = cls.__subclasses__()
        family += [child for child in children if child.__module__.partition(".")[0] == _PACKAGE]
        yield cls
    yield from (globals()[name] for name in __all__)


def _cannot_say(what: str, our_class: Any, argument_name: str) -> UsageError:
    return UsageError(
        explain(
            f"{argument_name}: the installed torch's {what} has no equal in {_PACKAGE}.",
            expected=f"what {_full_name(our_class)} can hold: {_contents(our_class)}",
            got=what,
            where=f"argument {argument_name!r}",
            fix=_how_to_write(our_class),
        )
    )


def _contents(cls: Any) -> str:
    names = (
        cls.__members__
        if issubclass(cls, enum.Enum)
        else [field.name for field in dataclasses.fields(cls)]
    )
    return ", ".join(names)


def _how_to_write(cls: Any) -> str:
    if issubclass(cls, enum.Enum):
        return f"Pass one of {', '.join(f'{cls.__name__}.{name}' for name in cls.__members__)}."
    return f"Pass {cls.__name__}({'...' if dataclasses.fields(cls) else ''})."


def _full_name(cls: type) -> str:
    return (
        cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
    )
