"""The names that the functions of torch.distributed.checkpoint.state_dict use, and flattened
optimizer state dicts, whose keys contain them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from .._state.optim_contents import ParamContents
from .._state.rank_local import RankState
from .._state.units import clean_name
from ..errors import NotImplementedUsageError


class Names:
    """Our names and torch's, without the prefixes of compilers and DistributedDataParallel."""

    def __init__(self, model: nn.Module) -> None:
        self.of_module: dict[nn.Module, str] = {}
        self._public, self._own = {"": ""}, {"": ""}
        by_path: dict[str, nn.Module] = {}
        public_path: dict[str, str] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            by_path[path] = module
            above, _, part = path.rpartition(".")
            if not path:
                public = ""
            elif not clean_name(part) or isinstance(by_path[above], DistributedDataParallel):
                public = public_path[above]
            else:
                public = f"{public_path[above]}.{part}".lstrip(".")
            public_path[path] = public
            self.of_module.setdefault(module, public)
            self._public[clean_name(path)] = public
            self._own[public] = clean_name(path)  # the innermost of the modules that have one name

    def public(self, own: str) -> str:
        """Return torch's name for what our state dicts call ``own``."""
        return _with_head(own, self._public)

    def own(self, public: str) -> str:
        """Return what our state dicts call something, given torch's name."""
        return _with_head(public, self._own)


def _with_head(name: str, heads: Mapping[str, str]) -> str:
    """Replace the longest part of a name that is a module's."""
    above, _, last = name.rpartition(".")
    head, rest = _split(above, heads)
    return ".".join(part for part in (heads[head], rest, last) if part)


def names_in(
    held: Mapping[nn.Parameter, ParamContents], parameter: nn.Parameter
) -> tuple[tuple[str, ...], ...]:
    """Return all names of each parameter in one of the optimizer's; none for a foreign one."""
    return tuple(held[parameter].all_names.values()) if parameter in held else ()


def flattened(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return {"state.<parameter>.<key>": value, "param_groups.<parameter>.<key>": value}."""
    found: dict[str, Any] = {}

    def add(prefix: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for key, inner in value.items():
                add(f"{prefix}.{key}", inner)
        elif isinstance(value, (torch.Tensor, int, float, RankState)):
            found[prefix] = value
        else:
            raise NotImplementedUsageError.of(
                "This optimizer's state cannot be flattened.",
                expected="tensors, numbers and dicts of them",
                got=f"a {type(value).__name__}",
                where=prefix,
                fix="leave flatten_optimizer_state_dict out",
            )

    for name, entry in state["state"].items():
        add(f"state.{name}", entry)
    for group in state["param_groups"]:
        for name in group["params"]:
            found.update(
                (f"param_groups.{name}.{key}", value)
                for key, value in group.items()
                if key != "params"
            )
    return found


def unflattened(
    state: Mapping[str, Any],
    optimizer: Optimizer,
    names: Names,
    held: Mapping[nn.Parameter, ParamContents],
) -> dict[str, Any]:
    """Undo ``flattened`` for the parameters of one optimizer: a group for each of them."""
    known = {
        names.public(name)
        for group in optimizer.param_groups
        for param in group["params"]
        for param_names in names_in(held, param)
        for name in param_names
    }
    entries: dict[str, dict[str, Any]] = {}
    settings: dict[str, dict[str, Any]] = {}
    for key, value in state.items():
        kind, _, rest = key.partition(".")
        name, inner = _split(rest, known)
        if not name:
            continue
        place: dict[str, Any] = (entries if kind == "state" else settings).setdefault(name, {})
        *above, last = inner.split(".")
        for part in above:
            place = place.setdefault(part, {})
        place[last] = value
    groups = [{**its, "params": [name]} for name, its in settings.items()]
    return {"state": entries, "param_groups": groups}


def _split(name: str, known: Collection[str]) -> tuple[str, str]:
    """Split a name behind the longest part that is ``known``, or before all of it."""
    head = name
    while head and head not in known:
        head = head.rpartition(".")[0]
    return head, name[len(head) :].lstrip(".")
