"""Enums and configuration objects that ``FullyShardedDataParallel`` takes, under torch's names.

Members, fields and defaults equal those of ``torch.distributed.fsdp.api``. Torch's own objects are
accepted; ``as_ours`` translates them."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from fsdp_compat.errors import UsageError, wrong_type

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

# The common base of BatchNorm1d, 2d, 3d and SyncBatchNorm.
_BATCH_NORM: type[nn.Module] = nn.BatchNorm1d.__bases__[0]
_TORCH_FSDP = "torch.distributed.fsdp"
_EXAMPLES = {
    "ShardingStrategy": "ShardingStrategy.FULL_SHARD",
    "MixedPrecision": "MixedPrecision(param_dtype=torch.bfloat16)",
    "MixedPrecisionPolicy": "MixedPrecisionPolicy(param_dtype=torch.bfloat16)",
    "CPUOffload": "CPUOffload(offload_params=True)",
}


class ShardingStrategy(enum.Enum):
    """How parameters are sharded, and whether they stay unsharded between forward and backward.

    After a forward inside no_grad, the strategies that do not free parameters keep them until an
    optimizer step, another write that autograd sees, or a forward outside of it. Gradients and
    optimizer state are sharded in the same way. With a device mesh of two dimensions (replica,
    shard), or two process groups, the hybrid strategies use these instead of nodes.

    Attributes:
        FULL_SHARD: sharded over all ranks; unsharded parameters are freed after forward and
            gathered again in backward.
        SHARD_GRAD_OP: sharded over all ranks; unsharded parameters are kept until the end of
            backward.
        NO_SHARD: not sharded: every rank holds all parameters, as with DDP.
        HYBRID_SHARD: FULL_SHARD over the ranks of a node, with a replica on each node.
        _HYBRID_SHARD_ZERO2: SHARD_GRAD_OP over the ranks of a node, with a replica on each node."""

    FULL_SHARD = enum.auto()
    SHARD_GRAD_OP = enum.auto()
    NO_SHARD = enum.auto()
    HYBRID_SHARD = enum.auto()
    _HYBRID_SHARD_ZERO2 = enum.auto()


class BackwardPrefetch(enum.Enum):
    """When backward starts to gather the next unit; None in place of a member: when it is needed.

    Attributes:
        BACKWARD_PRE: before the current unit's gradients are computed: most overlap, two unsharded
            units in memory.
        BACKWARD_POST: after them: the current unit is freed first, so the peak is one unit lower.
    """

    BACKWARD_PRE = enum.auto()
    BACKWARD_POST = enum.auto()


@dataclass
class MixedPrecision:
    """The dtypes of computation, gradient reduction and buffers. Shards keep their original dtype.

    Only floating-point tensors of at least 16 bits are cast. The optimizer and checkpoints use the
    shards, so they keep the original dtype. Modules of a class in ``_module_classes_to_ignore``
    become units without mixed precision, with or without a wrap policy; their inputs are cast to
    their own dtype, and their outputs back. With the environment variable
    FSDP_USE_FULL_PREC_IN_EVAL=1, modules in evaluation mode compute in the original dtype.

    Attributes:
        param_dtype: dtype of the unsharded parameters in forward and backward. Default None: the
            original dtype.
        reduce_dtype: dtype in which gradients are sent; they are summed in the wider of this and
            the shard's dtype. Default None: ``param_dtype``.
        buffer_dtype: dtype to which buffers are cast once, before the first forward. Default None:
            not cast. State dicts contain them in their original dtype, with exact values unless
            they were written since.
        keep_low_precision_grads: whether ``.grad`` keeps the dtype of the reduction rather than the
            dtype of the shard. Default False.
        cast_forward_inputs: whether each unit casts its forward inputs to ``param_dtype``. Default
            False.
        cast_root_forward_inputs: whether the outermost unit does so, regardless of
            ``cast_forward_inputs``. Default True.
        _module_classes_to_ignore: classes without mixed precision. Default: the common base of all
            batch norms."""

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    cast_forward_inputs: bool = False
    cast_root_forward_inputs: bool = True
    _module_classes_to_ignore: Sequence[type[nn.Module]] = (_BATCH_NORM,)


@dataclass
class CPUOffload:
    """Where shards are stored between uses.

    On a device, a forward with a graph whose backward never runs leaves copies from the shards in
    flight: optimizers wait for them; other writes to parameters need torch.accelerator.synchronize
    first.

    Attributes:
        offload_params: whether shards, their gradients and the optimizer step stay on the CPU.
            Default False."""

    offload_params: bool = False


class StateDictType(enum.Enum):
    """What ``state_dict`` and ``load_state_dict`` contain for each parameter of a wrapped model.

    Attributes:
        FULL_STATE_DICT: the whole tensor under its original name, as before wrapping.
        LOCAL_STATE_DICT: this rank's shard of the flat parameter, and with ``use_orig_params=True``
            also its part of each parameter; needs the same wrapping and ranks.
        SHARDED_STATE_DICT: this rank's shard of each original parameter, under its original name;
            loads on any number of ranks."""

    FULL_STATE_DICT = enum.auto()
    LOCAL_STATE_DICT = enum.auto()
    SHARDED_STATE_DICT = enum.auto()


@dataclass
class StateDictConfig:
    """Settings of every kind of model state dict; use the subclass of the ``StateDictType``.

    Attributes:
        offload_to_cpu: whether the returned tensors are copies on the CPU. Default False."""

    offload_to_cpu: bool = False


@dataclass
class OptimStateDictConfig:
    """Settings of every kind of optimizer state dict; use the subclass of the ``StateDictType``.

    Attributes:
        offload_to_cpu: whether the returned tensors are copies on the CPU. Default True, unlike for
            models."""

    offload_to_cpu: bool = True


@dataclass
class FullStateDictConfig(StateDictConfig):
    """Settings of model state dicts for ``StateDictType.FULL_STATE_DICT``.

    Attributes:
        rank0_only: whether only rank 0 gets the tensors, and other ranks an empty dict. Default
            False. Set it together with ``offload_to_cpu`` to save a large model."""

    rank0_only: bool = False


@dataclass
class FullOptimStateDictConfig(OptimStateDictConfig):
    """Settings of optimizer state dicts for ``StateDictType.FULL_STATE_DICT``.

    Attributes:
        rank0_only: whether only rank 0 gets the state, and other ranks an empty dict. Default
            False."""

    rank0_only: bool = False


@dataclass
class ShardedStateDictConfig(StateDictConfig):
    """Settings of model state dicts for ``StateDictType.SHARDED_STATE_DICT``.

    Attributes:
        _use_dtensor: whether values are ``DTensor`` rather than ``ShardedTensor``. Default False;
            set for a model with a device mesh.
        as_views: whether ``ShardedTensor`` values view this rank's shard: they take no memory,
            change as training continues, and a value loaded into them changes the model. Default
            False: copies. Without effect together with ``offload_to_cpu``."""

    _use_dtensor: bool = False
    as_views: bool = False


@dataclass
class ShardedOptimStateDictConfig(OptimStateDictConfig):
    """Settings of optimizer state dicts for ``StateDictType.SHARDED_STATE_DICT``.

    Attributes:
        _use_dtensor: whether values are ``DTensor`` rather than ``ShardedTensor``. Default False;
            set for a model with a device mesh."""

    _use_dtensor: bool = False


@dataclass
class LocalStateDictConfig(StateDictConfig):
    """Settings of model state dicts for ``StateDictType.LOCAL_STATE_DICT``."""


@dataclass
class LocalOptimStateDictConfig(OptimStateDictConfig):
    """Settings of optimizer state dicts for ``StateDictType.LOCAL_STATE_DICT``.

    Attributes:
        offload_to_cpu: whether the returned tensors are copies on the CPU. Default False."""

    offload_to_cpu: bool = False


@dataclass
class StateDictSettings:
    """The form of the state dicts of a model and of its optimizer.

    Attributes:
        state_dict_type: the kind of both state dicts.
        state_dict_config: the model's settings, of the class for that kind.
        optim_state_dict_config: the optimizer's settings, of the class for that kind."""

    state_dict_type: StateDictType
    state_dict_config: StateDictConfig
    optim_state_dict_config: OptimStateDictConfig


def as_ours(value: object, expected: type[_T], argument_name: str) -> _T | None:
    """Return ``value`` as an instance of ``expected``: None and instances unchanged, an object of
    torch's FSDP translated, by the names of its class and of its member or fields.

    The result may be an instance of a subclass. Raises UsageError, naming ``argument_name``, for
    other types, and for members and fields that ours lacks."""
    if value is None:
        return None
    ours = _translated(value, expected, argument_name)
    if isinstance(ours, expected):
        return ours
    name = expected.__name__
    fix = f"pass {_EXAMPLES[name]}" if name in _EXAMPLES else ""
    raise wrong_type(argument_name, f"a {name} of fsdp_compat or torch", value, fix=fix)


def _translated(value: Any, expected: type, argument_name: str) -> Any:
    """Return our equivalent of an enum member or dataclass of torch's FSDP; anything else
    unchanged."""
    classes: dict[str, Any] = {expected.__name__: expected}
    classes = {name: globals()[name] for name in __all__} | classes
    bases = [cls for cls in type(value).__mro__ if cls.__module__.startswith(_TORCH_FSDP)]
    if not bases or bases[0].__name__ not in classes:
        return value
    theirs: Any = bases[0]
    ours = classes[theirs.__name__]
    if issubclass(ours, enum.Enum):
        if value.name not in ours.__members__:
            raise _has_no_equivalent(f"{ours.__name__}.{value.name}", argument_name)
        return ours[value.name]
    known = {field.name for field in dataclasses.fields(ours)}
    given = {}
    for field in dataclasses.fields(theirs):
        its = getattr(value, field.name)
        if field.name in known:
            given[field.name] = _translated(its, ours, argument_name)
        elif its != field.default:
            raise _has_no_equivalent(f"{ours.__name__}({field.name}={its!r})", argument_name)
    return ours(**given)


def _has_no_equivalent(what: str, argument_name: str) -> UsageError:
    return UsageError.of(
        f"{argument_name}: fsdp_compat has no equivalent of {what}.",
        expected="a value that fsdp_compat knows",
        got=f"{what} of torch {torch.__version__}",
        where=f"argument {argument_name!r}",
        fix="choose another value",
    )
