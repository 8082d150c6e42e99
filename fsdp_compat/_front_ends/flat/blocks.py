"""The blocks that a model repeats, such as its transformer layers: what ``auto_wrap_policy="auto"``
makes units of, and what a policy is told by class names."""

from __future__ import annotations

import collections
import difflib
import warnings
from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from ...errors import UsageError
from ...wrap import ModuleWrapPolicy

AUTO = "auto"
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
# Siblings of one class whose sizes differ by a larger factor are stages: their blocks are units.
_MAX_RATIO = 4
_LARGE_NUMEL = 100_000_000  # of a model for which one large unit is worth a warning

Blocks = dict[type[nn.Module], list[nn.Module]]


def policy_of(given: Any, root: nn.Module) -> Any:
    """Return the policy for "auto", or for names of classes; anything else unchanged. Raises
    UsageError for a name that no module of ``root`` has."""
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, Collection) or not names:
        return given
    if not all(isinstance(name, str) for name in names):
        return given
    if [*names] == [AUTO]:
        return ModuleWrapPolicy(set(repeated_blocks(root)))
    by_name: dict[str, set[type[nn.Module]]] = {}
    for module in root.modules():
        by_name.setdefault(type(module).__name__, set()).add(type(module))
    for name in names:
        if name not in by_name:
            raise _no_such_class(name, root, by_name)
    return ModuleWrapPolicy(set().union(*(by_name[name] for name in names)))


def _no_such_class(name: str, root: nn.Module, by_name: Collection[str]) -> UsageError:
    near = difflib.get_close_matches(name, by_name, 3, 0.3) if name.lower() != AUTO else []
    choice = f"one of the nearest names, {', '.join(near)}" if near else f'"{AUTO}"'
    repeated = sorted(each.__name__ for each in repeated_blocks(root))
    return UsageError.of(
        "auto_wrap_policy names a class that the model does not have.",
        expected='class names of modules in the model, or "auto"',
        got=f"{name!r}",
        where=f"wrapping a {type(root).__name__}",
        fix=f"pass {choice}; the model repeats {', '.join(repeated) or 'no block'}",
    )


def repeated_blocks(module: nn.Module) -> Blocks:
    """Return the outermost blocks that a module repeats, by class: siblings of one class in a list,
    dict or sequence of modules, each with submodules that have parameters."""
    found: Blocks = {}
    is_container = isinstance(module, _CONTAINERS)
    by_class: Blocks = collections.defaultdict(list)
    for child in module.children():
        by_class[type(child)].append(child)
    for cls, siblings in by_class.items():
        inner = [repeated_blocks(each) for each in siblings]
        is_block = not issubclass(cls, _CONTAINERS) and all(map(_has_parts, siblings))
        if is_container and is_block and len(siblings) > 1 and not _are_stages(siblings, inner):
            found.setdefault(cls, []).extend(siblings)
            continue
        for blocks in inner:
            for inner_cls, its in blocks.items():
                found.setdefault(inner_cls, []).extend(its)
    return found


def _has_parts(module: nn.Module) -> bool:
    return any(True for child in module.children() for _ in child.parameters())


def _are_stages(siblings: list[nn.Module], inner: list[Blocks]) -> bool:
    numels = [sum(parameter.numel() for parameter in each.parameters()) for each in siblings]
    return all(inner) and max(numels) > _MAX_RATIO * min(numels)


def warn_of_large_unit(owned: Mapping[nn.Module, Collection[nn.Parameter]]) -> None:
    """Warn of a unit that holds most parameters of a large model and could be several. owned: the
    parameters of each unit."""
    numels = {unit: sum(each.numel() for each in params) for unit, params in owned.items()}
    total, unit = sum(numels.values()), max(numels, key=lambda each: numels[each], default=None)
    if unit is None or total < _LARGE_NUMEL or 2 * numels[unit] <= total:
        return
    its = set(owned[unit])
    split = {
        cls.__name__: sum(p.numel() for block in blocks for p in block.parameters() if p in its)
        for cls, blocks in repeated_blocks(unit).items()
    }
    if 2 * sum(split.values()) > numels[unit]:
        warnings.warn(
            f"One unit, a {type(unit).__name__}, holds {numels[unit] / total:.0%} of the "
            f"parameters, and unshards them at the same time. It repeats {', '.join(split)}: pass "
            'auto_wrap_policy="auto" to make each of these a unit.',
            stacklevel=6,
        )
