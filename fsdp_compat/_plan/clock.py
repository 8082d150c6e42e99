"""How long a simulated step takes: kernels one after the other on the device, collectives one after
the other on the link, as soon as they are issued. An estimate."""

from __future__ import annotations

from typing import Any

from .._comm.transport import Kind, Traffic, Transport
from .._cost_model import H100, Machine
from .._engine.dtypes import tensors_in
from .._torch_private import simulation
from ..errors import UsageError

MACHINES = {"H100": H100}


def machine_named(name: str) -> Machine:
    if name not in MACHINES:
        raise UsageError.of(
            f"There is no cost model of {name!r}.",
            expected=" or ".join(map(repr, MACHINES)),
            got=f"device={name!r}",
            where="plan(...)",
            fix="name one of these; memory and traffic do not depend on it",
        )
    return MACHINES[name]


class _ToldTraffic(Traffic):
    """Traffic that tells a clock of every collective."""

    def __init__(self, clock: Clock, ranks: tuple[int, ...]) -> None:
        super().__init__()
        self._clock, self._ranks = clock, ranks

    def add(self, kind: Kind, nbytes: int) -> None:
        super().add(kind, nbytes)
        self._clock.send(kind, nbytes, self._ranks)


class Clock:
    """The time of the device and of the link, in seconds."""

    def __init__(self, machine: Machine) -> None:
        self.flops, self.exposed_s, self.device_s = 0, 0.0, 0.0
        self._machine, self._link_s = machine, 0.0
        self._arrives = dict[str, float]()  # the all-gather of a unit
        self.gathering = ""  # the unit whose all-gather starts

    def restart(self) -> None:
        self.flops, self.exposed_s, self.device_s, self._link_s = 0, 0.0, 0.0, 0.0

    def follow(self, communicator: Transport) -> None:
        """Take the communicator's collectives into account."""
        communicator.traffic = _ToldTraffic(self, communicator.members)

    def compute(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Add a kernel. Views take no time."""
        written = list(tensors_in(result))
        if simulation.is_view(func) or not written:
            return
        flops = simulation.flops_of(func, args, kwargs, result)
        self.flops += flops
        nbytes = sum(each.nbytes for each in (*tensors_in((args, kwargs)), *written))
        self.device_s += self._machine.kernel_s(nbytes, flops)

    def send(self, kind: Kind, nbytes: int, ranks: tuple[int, ...]) -> None:
        """Add a collective; ``nbytes``: that this rank sends, and receives."""
        took_s = self._machine.collective_s(nbytes, ranks)
        self._link_s = max(self._link_s, self.device_s) + took_s
        if kind is Kind.GATHER:
            self._arrives[self.gathering] = self._link_s

    def wait(self, unit: str | None = None) -> None:
        """Wait for the all-gather of a unit, or for all collectives."""
        until = self._link_s if unit is None else self._arrives.pop(unit, 0.0)
        self.exposed_s += max(0.0, until - self.device_s)
        self.device_s = max(self.device_s, until)
