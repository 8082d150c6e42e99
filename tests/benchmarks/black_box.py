"""What a black box costs in a step, beside the same step without one.

    FSDP_COMPAT_BLACK_BOX=/dev/shm/box PYTHONPATH=. python tests/benchmarks/black_box.py

One rank of 8 over torch's fake process group trains 64 small units on one thread. Steps without and
with the box follow each other: off, on, on, off. Prints the events of a unit in a step, and the
microseconds of CPU that they take: the median of the differences within such a group of four
steps, and the difference of the fastest steps."""

from __future__ import annotations

import gc
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat._engine import events
from fsdp_compat.wrap import ModuleWrapPolicy

UNITS, GROUPS = 64, 400


class Block(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(nn.Linear(4, 4) for _ in range(4)))


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    net = nn.Sequential(*(Block() for _ in range(UNITS)))
    model, x = FSDP(net, auto_wrap_policy=ModuleWrapPolicy({Block})), torch.ones(2, 4)
    box = events.tell

    def step_us(listener: events.Listener | None) -> float:
        events.listen(listener)
        start = time.process_time_ns()
        model(x).sum().backward()
        model.zero_grad()
        return (time.process_time_ns() - start) / UNITS / 1e3

    for _ in range(5):
        step_us(box)
    told: list[int] = []
    step_us(lambda event, label, error=None: told.append(event))
    gc.disable()
    off, on = [], []
    for _ in range(GROUPS):
        off.append(step_us(None))
        on += [step_us(box), step_us(box)]
        off.append(step_us(None))
    pairs = zip(off[::2], off[1::2], on[::2], on[1::2], strict=True)
    cost = statistics.median((c + d - a - b) / 2 for a, b, c, d in pairs)
    print(f"{len(told) / UNITS:.1f} events of a unit and step of {min(off):.1f} us: {cost:.1f} us")
    print(f"by the fastest steps: {min(on) - min(off):.1f} us")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
