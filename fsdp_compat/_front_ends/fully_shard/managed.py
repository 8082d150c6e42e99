"""Which modules, parameters and buffers one call of ``fully_shard`` manages."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence

import torch
from torch import nn

from ... import _torch_private
from ..._engine.ownership import OrigParam, ParamSlots


@dataclasses.dataclass(frozen=True)
class Managed:
    """What one call manages."""

    roots: tuple[nn.Module, ...]  # the modules that were passed, without those inside others
    modules: Sequence[nn.Module]  # the roots and the modules in them, outer ones first
    params: Sequence[OrigParam]  # names begin at the root, with several roots at its number
    buffers: Sequence[torch.Tensor]

    @property
    def holders(self) -> list[nn.Module]:
        """The modules that hold the parameters, each once."""
        return list(dict.fromkeys(module for param in self.params for module, _ in param.slots))


def root_modules(modules: Sequence[nn.Module]) -> tuple[nn.Module, ...]:
    """Return ``modules``, each once, without those that are inside others."""
    inside = {child for module in modules for child in module.modules() if child is not module}
    return tuple(module for module in dict.fromkeys(modules) if module not in inside)


def managed_by(
    roots: tuple[nn.Module, ...],
    ignored: Collection[nn.Parameter],
    is_closed: Callable[[nn.Module], bool],
) -> Managed:
    """Return what a call for ``roots`` manages.

    ignored: parameters that it leaves alone. is_closed: modules, other than the roots, that are not
    entered, because another call manages them.
    """
    names: dict[nn.Module, list[str]] = {}

    def visit(module: nn.Module, name: str) -> None:
        if module not in roots and is_closed(module):
            return
        names.setdefault(module, []).append(name)
        for attribute, child in _torch_private.children_of(module):
            visit(child, f"{name}.{attribute}" if name else attribute)

    for number, root in enumerate(roots):
        visit(root, "" if len(roots) == 1 else str(number))

    slots: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    buffers: dict[torch.Tensor, None] = {}
    for module in names:
        for attribute, parameter in _torch_private.parameters_of(module).items():
            if parameter is not None and parameter not in ignored:
                slots.setdefault(parameter, []).append((module, attribute))
        buffers.update((buffer, None) for buffer in module.buffers(recurse=False))
    params = [
        OrigParam(
            parameter,
            ParamSlots(
                tuple(its),
                tuple(
                    f"{name}.{attribute}" if name else attribute
                    for module, attribute in its
                    for name in names[module]
                ),
            ),
        )
        for parameter, its in slots.items()
    ]
    modules = [m for m in names if not _is_ignored(m, ignored)] if ignored else list(names)
    return Managed(roots, modules, params, list(buffers))


def _is_ignored(module: nn.Module, ignored: Collection[nn.Parameter]) -> bool:
    """True if a module has parameters, all of them ignored, and no buffers."""
    parameters = list(module.parameters())
    return (
        bool(parameters)
        and all(parameter in ignored for parameter in parameters)
        and next(iter(module.buffers()), None) is None
    )
