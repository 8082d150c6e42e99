"""Handles of work that was started and is waited for later."""

from __future__ import annotations

from ..._engine.runtime import Runtime, runtime_of
from ..._engine.unit import Residency, Unit


class UnshardHandle:
    """Returned by ``FSDPModule.unshard(async_op=True)``."""

    def wait(self) -> None:
        """Make the unsharded parameters readable, and show them. A second call does nothing.

        Collective: all ranks of the module's mesh."""


class UnitHandle(UnshardHandle):
    """The handle of one unit."""

    def __init__(self, unit: Unit) -> None:
        self._unit: Unit | None = unit

    def wait(self) -> None:
        """See UnshardHandle."""
        unit, self._unit = self._unit, None
        if unit is None:
            return
        unit.finish_unshard()
        if unit.residency is Residency.UNSHARDED:
            unit.view.show_unsharded()
            unit.views_of_users.watch(in_graph=False)
        if unit.runtime is None or not runtime_of(unit).runs:
            for group in unit.groups:
                group.shard.settle("parameters that this rank has sent")


class GradientReductionHandle:
    """Returned by ``FSDPModule.finalize_backward(async_op=True)``. runtime: reduces, or None."""

    def __init__(self, runtime: Runtime | None) -> None:
        self._runtime = runtime

    def wait(self) -> None:
        """Wait for the reductions: gradients are complete then. A second call does nothing.

        Collective: all ranks of the model's mesh."""
        runtime, self._runtime = self._runtime, None
        if runtime is not None:
            runtime.backward.end_finalize()
