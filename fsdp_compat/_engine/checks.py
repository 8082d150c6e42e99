"""Checks a model before passes and between steps: the user's changes are adopted, or refused with
an error that says what to do.

What a write to a parameter means, however ranks exchange data:

- To an unsharded parameter, by any means (``.data``, numpy, in place): it changes temporary values
  of this rank until the unit is resharded, after forward (not the root, nor with SHARD_GRAD_OP) and
  after backward. With one rank, or NO_SHARD, the parameter is the shard: the write is permanent.
- To a sharded parameter between steps: it takes effect in the next forward.
- To a sharded parameter between a forward and its backward: as in plain torch, an error if autograd
  sees it (optimizer steps, in-place operations) and the graph has saved the parameter
  (``follow_writes``), or if the unit stays unsharded. A write that autograd does not see, as by
  ``.data``, takes effect if the unit is gathered again, and is not allowed otherwise.
- Units of ``fully_shard`` compute in backward with the current values of sharded parameters: they
  are gathered again (Freshness)."""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from ..errors import AssertedStateError, StateError, UsageError
from . import agreement, hooks
from .communicators import Communicators
from .group import Group
from .preparation import is_uninitialised
from .unit import Residency, Unit
from .user_changes import ExternalChanges, register_before_steps


class Checks:
    """The checks before each forward and backward of one runtime."""

    def __init__(self, root: Unit, units: Sequence[Unit], communicators: Communicators) -> None:
        self._root, self._units, self._communicators = root, units, communicators
        self.changes = ExternalChanges(())
        register_before_steps(self)
        # In the first forward, flat units are compared over the ranks, and need values: not in a
        # simulation on the meta device. ShardedModules of fully_shard compares when it makes the
        # runtime, and leaves values to the user.
        self._checks_first_forward = root.options.device.type != "meta" and any(
            u.is_flat for u in units
        )

    def use_groups(self, groups: Iterable[Group]) -> None:
        """Check ``groups`` from now on."""
        self.changes = ExternalChanges(groups)

    def before_forward(self) -> None:
        """Collective: the model, in the first forward."""
        self.changes.follow_writes()
        if not self.changes.is_intact():
            self._check_units()
            if not any(unit.view.summoned for unit in self._units):  # these were not checked
                self.changes.record()
        if self._checks_first_forward:
            device = self._root.options.device
            agreement.require_units_alike(self._units, device, self._root.label)
            self._require_values()
            self._checks_first_forward = False

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Before a step, wait for copies of offloaded shards, which a forward without a backward
        has left. Raise StateError if communication has failed, or if a gradient of the optimizer's
        parameters was not reduced; a backward that raised may have left some, which the next
        forward drops."""
        works, runtime = self._communicators.before_step(), self._root.runtime
        if runtime is None or runtime.backward.is_open:
            return
        if works and not self.changes.groups_with_gradients():
            return
        held = {id(each) for group in optimizer.param_groups for each in group["params"]}
        for unit in self._units:
            for group in () if unit.view.summoned else unit.groups:
                if not held.isdisjoint(id(param) for param, _ in group.store.sharded_params):
                    group.shard.require_working()  # or its gradients may not be reduced
                    _require_reduced(group)

    def _check_units(self) -> None:
        """Adopt or refuse what the user has changed between steps."""
        moved = self.changes.sharded.changed()
        for unit in self._units:
            if moved and unit.kept is not None:
                unit.reshard()
            for group in () if unit.view.summoned else unit.groups:
                _require_reduced(group)
                group.store.check(group.name)
                group.require_unsharded_params()
                for index, param in group.requires_grad.follow(group.name):
                    hooks.on_gradient_of_param(unit, group, index, param)

    def _require_values(self) -> None:
        """Raise UsageError, on all ranks, if some rank has a tensor from the meta device without
        values. Collective: one byte, once."""
        missing, names = [], []
        for unit in self._units:
            for name, read in unit.uninitialised:
                names.append(f"{name!r} of {unit.label}")
                value = read()
                if value is not None and is_uninitialised(value):
                    missing.append(names[-1])
        [some_missing] = self._communicators.any_rank(
            [bool(missing)], "a check that all parameters and buffers have values"
        )
        if some_missing:
            # If only other ranks lack values, this one names its tensors from the meta device.
            shown = missing or names or ["tensors of another rank"]
            raise UsageError.of(
                "Parameters or buffers from the meta device were never given values.",
                expected="reset_parameters() or param_init_fn to fill all tensors of a module, "
                "including non-persistent buffers; or load_state_dict(); or "
                "sync_module_states=True with values on the first rank",
                got=f"uninitialised memory in {', '.join(shown[:5])}"
                f"{' and more' if len(shown) > 5 else ''}",
                where=self._root.label,
                fix="fill them in reset_parameters() or param_init_fn",
            )
        for unit in self._units:
            unit.uninitialised = []

    def before_backward(self) -> None:
        """Raise AssertedStateError if parameters that stay unsharded from forward to backward were
        written to or given other memory in between. For others autograd refuses backward if the
        graph has saved what was written to (``follow_writes``)."""
        written = self.changes.follow_writes()
        moved = self.changes.sharded.changed()
        for unit in self._units:
            kept = unit.residency is Residency.UNSHARDED
            for group in () if unit.view.summoned else unit.groups:
                if kept:
                    group.require_unsharded_params()
                    if group in written and not group.memory.aliased:
                        _refuse_change(
                            group,
                            "optimizer.step() and other changes before forward or after backward",
                            "a parameter that was written to after the forward",
                            "call backward() before optimizer.step(), and forward again after it",
                        )
                if moved and not group.store.is_intact():
                    if kept:
                        _refuse_change(
                            group,
                            "changes by `.data =` before forward or after backward: this unit "
                            "stays unsharded in between",
                            "a parameter that has other memory than in forward",
                            "move the change, or choose a strategy that reshards after forward "
                            "(FULL_SHARD)",
                        )
                    group.store.check(group.name)


def require_own(units: Iterable[Unit]) -> None:
    """Raise StateError if parameters were replaced. Values set by `.data =` between steps take
    effect from now on."""
    for unit in units:
        unit.view.require_own()
        for group in () if unit.view.summoned else unit.groups:
            group.store.check(group.name)


def refuse_meta(fn: Callable[[Tensor], Tensor], shards: Iterable[Tensor], where: str) -> None:
    """Raise StateError if ``fn``, about to be applied, moves shards to the meta device."""
    for dtype, device in {(shard.dtype, shard.device) for shard in shards if not shard.is_meta}:
        if fn(torch.empty(0, dtype=dtype, device=device)).is_meta:
            raise StateError.of(
                "A sharded model cannot be moved to the meta device.",
                expected="a device with memory",
                got=f"a move of shards from {str(device)!r} to 'meta'",
                where=where,
                fix="delete it to free its memory, or build it on the meta device, then shard it",
            )


def refuse_in_pass(what: str, where: str, error: type[StateError]) -> typing.NoReturn:
    """Refuse ``what``, which was called inside forward or backward."""
    raise error.of(
        f"{what} was called while the model runs.",
        expected="a call between steps",
        got="a call inside forward or backward",
        where=where,
        fix="call it before forward, or after backward has returned",
    )


def _refuse_change(group: Group, expected: str, got: str, fix: str) -> typing.NoReturn:
    raise AssertedStateError.of(
        "Parameters were changed between forward and backward, which uses the values of forward.",
        expected=expected,
        got=got,
        where=group.name,
        fix=fix,
    )


def _require_reduced(group: Group) -> None:
    index = group.gradients.bypassed_hooks()
    if index is None:
        return
    group.gradients.discard()
    shape = tuple(group.memory.unsharded_params[index].shape)
    raise StateError.of(
        "A gradient bypassed FSDP's hooks and was never reduced across ranks.",
        expected="backward from the outputs of a unit's forward, or from tensors that its "
        "arguments, its modules' attributes or their hooks hold after it",
        got=f"a gradient on parameter {index} (shape {shape}) left by an earlier backward",
        where=group.name,
        fix="compute the loss from what forward returns, or from attributes of the unit's modules "
        "(self.name = tensor)",
    )
