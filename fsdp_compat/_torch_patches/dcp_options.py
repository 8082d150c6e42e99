"""The options of the functions of torch.distributed.checkpoint.state_dict, and errors for
unsupported ones."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from ..errors import UsageError, wrong_type

_PACKAGE = __name__.partition(".")[0]


@dataclasses.dataclass(frozen=True)
class Options:
    """torch's StateDictOptions."""

    full_state_dict: bool = False
    cpu_offload: bool = False
    ignore_frozen_params: bool = False
    keep_submodule_prefixes: bool = True
    strict: bool = True
    broadcast_from_rank0: bool = False
    flatten_optimizer_state_dict: bool = False

    @property
    def on_rank0(self) -> bool:
        """True if only rank 0 gets a dict, or needs one."""
        return self.full_state_dict and (self.cpu_offload or self.broadcast_from_rank0)


_FIELDS = {field.name for field in dataclasses.fields(Options)}
_IGNORED = {"dsd_fqn_modifiers"}  # state dicts have the names that their modules' own hooks give


def resolve(options: Any, call: str) -> Options:
    if options is None:
        return Options()
    if not dataclasses.is_dataclass(options) or isinstance(options, type):
        raise wrong_type("options", "a StateDictOptions, or None", options, call)
    for field in dataclasses.fields(options):
        known = field.name in _FIELDS | _IGNORED
        if not known and getattr(options, field.name) != field.default:
            raise unknown_argument(f"options.{field.name}", call)
    found = Options(
        **{name: bool(getattr(options, name)) for name in _FIELDS if hasattr(options, name)}
    )
    if found.broadcast_from_rank0 and not found.full_state_dict:
        raise UsageError.of(
            "Loading from rank 0 needs a full state dict.",
            expected="full_state_dict=True with broadcast_from_rank0=True",
            got="full_state_dict=False",
            where=f"{call}(..., options=StateDictOptions(...))",
            fix="set both, or leave broadcast_from_rank0 out: sharded values need no rank 0",
        )
    return found


def unknown_argument(name: str, call: str) -> UsageError:
    """Return the error for an argument of the installed torch that ours does not know."""
    return UsageError.of(
        f"torch {torch.__version__} has an argument that {_PACKAGE} does not know: {name}.",
        expected=f"a call without {name} for a model with units of {_PACKAGE}",
        got=name,
        where=call,
        fix=f"update {_PACKAGE}, or use FullyShardedDataParallel.state_dict_type(...) with "
        "state_dict()",
    )


def mixed(call: str) -> UsageError:
    """Return the error for a model with torch's FSDP modules beside ours."""
    return UsageError.of(
        f"The model has FullyShardedDataParallel modules of torch and of {_PACKAGE}.",
        expected="modules of one of them",
        got="both",
        where=call,
        fix="import FullyShardedDataParallel from one place, or take the state dicts of the "
        "parts one by one",
    )
