"""Runs steps of one model on the meta device, and keeps what the last one took."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from .. import _torch_private
from .._comm.board import events
from .._engine.group import Group
from .._engine.nested import tensors_in
from .._engine.runtime import live_runtimes
from .._features.description import UnitDescription, describe
from . import simulation
from .memory import LEFT_OUT, Memory, Sizes

PHASES = ("forward", "backward", "optimizer", "between")
Traffic = Mapping[str, Mapping[str, tuple[int, int]]]


class Moment(NamedTuple):
    """The most memory between two events of units."""

    phase: str  # "forward", "backward", "optimizer" or "between" (steps)
    unit: str  # that was unsharded last
    nbytes: int
    by_kind: Sizes


class SimulatedStep:
    """A sharded model, its optimizer, and what runs its forward and backward."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        run: Callable[[], object],
    ) -> None:
        self._model, self._optimizer, self._run = model, optimizer, run
        self.assumptions = simulation.Assumptions()
        self.timeline = list[Moment]()  # the most memory between each two events
        self._memory = Memory("meta", self._rise, self.assumptions.answer)
        self._phase, self._unit = PHASES[0], ""
        self._now: Moment | None = None  # the most since the last event
        self._reduced = collections.deque[str]()  # units whose gradients are to be marked
        self._groups = dict[str, list[Group]]()  # by unit

    def run_twice(self, batch: Any) -> None:
        """Run two steps with a batch, and keep what the second takes: in the first, fully_shard
        makes its groups, and memory that is kept over steps is allocated."""
        before = events.listen(self._tell)
        try:
            with self._memory, simulation.fused_attention():
                for _ in range(2):
                    self._restart(batch)
                    self._step()
                    self._close()
        finally:
            events.listen(before)

    def _step(self) -> None:
        memory = self._memory
        self._enter("forward")
        self._run()
        grads = (each.grad for each in self._model.parameters())
        memory.mark("gradients", (each for each in grads if each is not None))
        self._enter("optimizer")
        memory.default = "optimizer"
        self._optimizer.step()
        memory.default = "activations"
        self._optimizer.zero_grad()
        self._enter("between")

    def _restart(self, batch: Any) -> None:
        """Say of what kind all memory is, and drop what was counted."""
        modules, mark = set(self._model.modules()), self._memory.mark
        self._groups = {
            unit.label: list(unit.groups)
            for runtime in live_runtimes()
            if runtime.root.module in modules
            for unit in runtime.units
        }
        mark("parameters", self._model.parameters())
        mark("buffers", self._model.buffers())
        mark("activations", tensors_in(batch))
        for group in self._all_groups():
            buffer, shard = group.gradients.buffer, group.store.shard
            mark("parameters", [shard])
            # On meta, the parameters of fully_shard do not view the shard.
            shown = [param for param, _ in group.store.sharded_params]
            mark(LEFT_OUT, (x for x in shown if not _torch_private.same_storage(x, shard)))
            for each in group.memories:
                mark("gathered", each.storages)
            mark("reducing", [] if buffer is None else [buffer])
        for communicator in self._communicators():
            communicator.traffic.clear()
        self.timeline.clear()
        self._now = None

    def _all_groups(self) -> Iterable[Group]:
        return (group for groups in self._groups.values() for group in groups)

    def _communicators(self) -> dict[Any, str]:
        found = {group.shard: "shard" for group in self._all_groups()}
        return found | {group.replica: "replica" for group in self._all_groups()}

    # -- events

    def _tell(self, event: int, label: str, error: BaseException | None = None) -> None:
        if event == events.UNSHARDED:
            self._enter(self._phase, label)
        elif event == events.REDUCING:
            self._reduced.append(label)
        self._mark_gradients()

    def _mark_gradients(self) -> None:
        """Mark the gradients of the unit whose reduction is the oldest, once they are there."""
        while self._reduced:
            groups = self._groups.get(self._reduced[0], [])
            params = [each for group in groups for each, _ in group.store.sharded_params]
            grads = [each.grad for each in params if each.grad is not None]
            if not grads:
                return
            self._memory.mark("gradients", grads)
            self._reduced.popleft()

    def _enter(self, phase: str, unit: str | None = None) -> None:
        self._close()
        self._phase, self._unit = phase, self._unit if unit is None else unit
        self._memory.restart()

    def _rise(self, nbytes: int, by_kind: Sizes) -> None:
        phase = "backward" if _torch_private.in_graph_task() else self._phase
        self._now = Moment(phase, self._unit, nbytes, by_kind)

    def _close(self) -> None:
        """End what is between two events."""
        if self._now is not None:
            self.timeline.append(self._now)
        self._now = None

    # -- the result

    @property
    def units(self) -> tuple[UnitDescription, ...]:
        return describe(self._model).units

    @property
    def traffic(self) -> Traffic:
        """By axis and kind: the collectives, and the bytes that this rank has sent."""
        found = collections.defaultdict[str, dict[str, tuple[int, int]]](dict)
        for communicator, axis in self._communicators().items():
            sent = communicator.traffic
            for kind, number in sent.counts.items():
                before = found[axis].get(kind.name.lower(), (0, 0))
                found[axis][kind.name.lower()] = number + before[0], sent.nbytes[kind] + before[1]
        return dict(found)
