"""``plan``: what a training step of one of many ranks takes, without GPU and process group."""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from .._engine.nested import map_tensors, tensors_in
from .._features.description import UnitDescription, padding_notes
from ..errors import UsageError
from ..fully_sharded_data_parallel import FullyShardedDataParallel
from . import simulation
from .memory import KINDS
from .step import PHASES, Moment, SimulatedStep, Traffic

_GIB = 1 << 30
_NUM_NAMES = 16  # of units in a plot
_NOT_INCLUDED = (
    "Not included: memory inside of kernels, rounding and fragmentation of the allocator, buffers "
    "of NCCL, the context of the device: fits() keeps {reserve:.1f} GiB for them."
)


@dataclasses.dataclass(frozen=True, repr=False)
class Plan:
    """What a training step takes on one rank; ``print`` shows it as a table.

    Attributes:
        world_size: the number of ranks.
        units: as ``describe`` returns them.
        timeline: the most memory between each two events of units: phase, unit, bytes by kind.
        traffic: {"shard" or "replica": {kind: (collectives, bytes sent by this rank)}}, in one
            step.
        assumed: what tensors without values answered, by line.
        reserve: bytes that ``fits`` keeps for what is not simulated."""

    world_size: int
    units: tuple[UnitDescription, ...]
    timeline: tuple[Moment, ...]
    traffic: Traffic
    assumed: Mapping[str, bool | float | int]
    reserve: int

    @property
    def peak(self) -> Moment:
        """The moment with the most memory."""
        return max(self.timeline, key=attrgetter("nbytes"))

    @property
    def phases(self) -> dict[str, Moment]:
        """The peak of each phase."""
        found: dict[str, Moment] = {}
        for moment in sorted(self.timeline, key=attrgetter("nbytes"), reverse=True):
            found.setdefault(moment.phase, moment)
        return {phase: found[phase] for phase in PHASES if phase in found}

    def fits(self, nbytes: int) -> bool:
        """Return whether a device with ``nbytes`` of memory holds the peak and ``reserve``."""
        return self.peak.nbytes + self.reserve <= nbytes

    def __repr__(self) -> str:
        phases, peak = self.phases, self.peak
        head = f"One of {self.world_size} ranks: {_gib(peak.nbytes)} GiB in {peak.phase}"
        rows = [["GiB", *phases]]
        for kind in KINDS:
            rows.append([kind, *(_gib(each.by_kind.get(kind, 0)) for each in phases.values())])
        rows.append(["peak", *(_gib(each.nbytes) for each in phases.values())])
        lines = [f"{head}, at {peak.unit}; units: {len(self.units)}", ""]
        lines += [f"{kind:12}" + "".join(f"{cell:>11}" for cell in cells) for kind, *cells in rows]
        lines.append("")
        for axis, kinds in self.traffic.items():
            for kind, (number, nbytes) in kinds.items():
                lines.append(f"{axis}: {number} x {kind}, {_gib(nbytes)} GiB sent in a step")
        lines += padding_notes(self.units)
        lines += [f"assumed: {value} at {line}" for line, value in self.assumed.items()]
        return "\n".join([*lines, _NOT_INCLUDED.format(reserve=self.reserve / _GIB)])

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw memory over the step, stacked by kind, with the unit that ran, to an image file.

        Args:
            path: the file.

        Raises:
            ModuleNotFoundError: there is no matplotlib."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(11, 6), layout="constrained")
        axes, moments = figure.subplots(), self.timeline
        places = range(len(moments))
        rows = [[each.by_kind.get(kind, 0) / _GIB for each in moments] for kind in KINDS]
        axes.stackplot(places, *rows, labels=KINDS, step="mid")
        for number in places:
            phase = moments[number].phase
            if phase != "between" and (not number or phase != moments[number - 1].phase):
                axes.axvline(number, color="black", linewidth=0.6)
                axes.annotate(f" {phase}", (number, axes.get_ylim()[1]), rotation=30)
        text = f"{_gib(self.peak.nbytes)} GiB, {self.peak.unit} "
        at = moments.index(self.peak), self.peak.nbytes / _GIB
        axes.annotate(text, at, ha="right", va="bottom")
        named = places[:: max(len(places) // _NUM_NAMES, 1)]
        names = [moments[number].unit.removeprefix("unit ") for number in named]
        axes.set_xticks(named, names, rotation=40, ha="right")
        axes.set(ylabel="GiB", xlim=(0, len(moments) - 1))
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), reverse=True)
        figure.suptitle(f"Memory of one of {self.world_size} ranks, planned")
        figure.savefig(path)


def _gib(nbytes: int) -> str:
    return f"{nbytes / _GIB:.3f}" if nbytes < 10 * _GIB else f"{nbytes / _GIB:.1f}"


def plan(
    model: nn.Module,
    world_size: int,
    batch: Any,
    *,
    wrap: Callable[[nn.Module], nn.Module | None] | None = None,
    optimizer: Callable[[Any], torch.optim.Optimizer] = torch.optim.AdamW,
    step: Callable[[nn.Module, Any], object] | None = None,
    reserve: int = 2 * _GIB,
    **fsdp: Any,
) -> Plan:
    """Return the memory and the traffic of a training step of one of ``world_size`` ranks.

    Two steps run on the meta device, with the engine's own schedule, and the second one counts. No
    GPU and no process group are needed; call it before init_process_group. ``model`` is unchanged.

    Attention without dropout is taken to be fused, as on accelerators. An operation that needs
    values, such as ``.item()``, returns 1 or True and is listed in ``assumed``. CPU offload and
    ``allow_unused_units`` cannot be planned.

    Args:
        model: on the meta device, in the mode (train or eval) to plan for.
        world_size: the number of ranks.
        batch: the arguments of forward: a dict, a sequence or one tensor. Only shapes and dtypes
            count.
        wrap: shards a model in place, or returns it sharded, with either front end (device meshes
            are those of the CPU). Default: ``FullyShardedDataParallel(model, **fsdp)``.
        optimizer: makes the optimizer, which must not be fused, from the parameters.
        step: runs forward and backward of a sharded model with a batch. Default: backward starts
            from the output's ``loss``, or from the mean of its first tensor.
        reserve: bytes that ``Plan.fits`` keeps free for memory that is not simulated.
        **fsdp: arguments of FullyShardedDataParallel, without ``wrap``.

    Returns:
        The plan.

    Raises:
        UsageError: parameters are not on the meta device, or there is a process group; wrapping and
            the step may raise others."""
    _check(model, world_size, wrap, fsdp)
    batch = map_tensors(batch, lambda tensor: tensor.to("meta"))
    with simulation.one_of(world_size):
        copied = copy.deepcopy(model)
        wrapped = wrap(copied) if wrap is not None else FullyShardedDataParallel(copied, **fsdp)
        wrapped = copied if wrapped is None else wrapped  # sharded in place
        run = functools.partial(step or _forward_and_backward, wrapped, batch)
        simulated = SimulatedStep(wrapped, optimizer(wrapped.parameters()), run)
        simulated.run_twice(batch)
        return Plan(
            world_size=world_size,
            units=simulated.units,
            timeline=tuple(simulated.timeline),
            traffic=simulated.traffic,
            assumed=simulated.assumptions.made,
            reserve=reserve,
        )


def _check(model: nn.Module, world_size: int, wrap: object, fsdp: Mapping[str, Any]) -> None:
    def refuse(first: str, expected: str, got: str, fix: str) -> UsageError:
        return UsageError.of(first, expected=expected, got=got, where="plan(...)", fix=fix)

    real = [name for name, tensor in model.named_parameters() if not tensor.is_meta]
    if real:
        raise refuse(
            "plan() needs a model on the meta device.",
            "parameters on the meta device",
            f"{real[0]} on {model.get_parameter(real[0]).device}",
            "build it inside `with torch.device('meta'):`",
        )
    if wrap is not None and fsdp:
        raise refuse(
            "wrap and arguments of FullyShardedDataParallel exclude each other.",
            "wrap=, or arguments such as auto_wrap_policy=, not both",
            f"both, with {', '.join(fsdp)}",
            "pass the arguments inside of wrap",
        )
    if world_size < 1:
        raise refuse(
            "A plan needs a rank.",
            "a positive world_size",
            f"world_size={world_size}",
            "pass the number of ranks",
        )


def _forward_and_backward(model: nn.Module, batch: Any) -> None:
    if isinstance(batch, Mapping):
        output = model(**batch)
    else:
        output = model(*batch) if isinstance(batch, (tuple, list)) else model(batch)
    loss = getattr(output, "loss", None)
    if not isinstance(loss, Tensor):
        loss = next(filter(Tensor.is_floating_point, tensors_in(output))).float().mean()
    loss.backward()
