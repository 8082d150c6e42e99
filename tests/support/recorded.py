"""A process group that only records: one process is a rank whose peers send the same as it does.

    with recorded(ranks=2) as log:
        model = FullyShardedDataParallel(...)  # or fully_shard
        step(model)
        issued(log)  # {"gather": [...], ...}

The log has the collectives of floating-point values, and whatever a test adds, in the order in
which they start and are waited for."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch.distributed as dist
from torch import Tensor, nn

BACKEND = "recorded"


class Event(NamedTuple):
    """One moment of a collective. numel, nbytes: of this rank's part."""

    what: str  # "gather", "reduce" or "all-reduce", and "gathered", ... once it is waited for
    numel: int
    nbytes: int


class _Work(dist._Work):
    def __init__(self, on_wait: Callable[[], None]) -> None:
        super().__init__()
        self.on_wait = on_wait

    def wait(self, *_: Any) -> bool:
        self.on_wait()
        return True


class _Group(dist.ProcessGroup):
    group_name = ""  # in place of a property of a backend in C++

    def __init__(self, rank: int, ranks: int, log: list[Any]) -> None:
        super().__init__(rank, ranks)
        self.ranks, self.log = ranks, log
        self.works: list[_Work] = []  # torch holds only their C++ halves

    def _set_group_name(self, name: str) -> None:
        self.group_name = name

    def getBackendName(self) -> str:
        return BACKEND

    def _start(self, begin: str, end: str, part: Tensor) -> _Work:
        def note(what: str) -> None:
            if part.is_floating_point():  # ranks compare integers
                self.log.append(Event(what, part.numel(), part.nbytes))

        note(begin)
        self.works.append(_Work(lambda: note(end)))
        return self.works[-1]

    def all_gather_single(self, full: Tensor, own: Tensor, *_: Any) -> _Work:
        full.view(self.ranks, -1).copy_(own.flatten().clone())  # it may lie in there
        return self._start("gather", "gathered", own)

    def reduce_scatter_single(self, total: Tensor, buffer: Tensor, *_: Any) -> _Work:
        total.copy_(buffer.view(self.ranks, *total.shape)[0] * self.ranks)
        return self._start("reduce", "reduced", total)

    def allreduce(self, tensors: list[Tensor], options: Any) -> _Work:
        if options.reduceOp == dist.ReduceOp.SUM:
            tensors[0].mul_(self.ranks)
        return self._start("all-reduce", "all-reduced", tensors[0])

    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single


_log: list[Any] = []
dist.Backend.register_backend(
    BACKEND, lambda _store, rank, size, _timeout: _Group(rank, size, _log), devices=["cpu"]
)


@contextlib.contextmanager
def recorded(ranks: int) -> Iterator[list[Any]]:
    """Be rank 0 of a world that records, instead of the present one, and yield its log."""
    if dist.is_initialized():
        dist.destroy_process_group()
    with mock.patch.dict(os.environ, {"FSDP_COMPAT_MEET": "0"}):  # no peer would come
        dist.init_process_group(BACKEND, rank=0, world_size=ranks, store=dist.HashStore())
        _log.clear()
        try:
            yield _log
        finally:
            dist.destroy_process_group()


def issued(log: list[Any]) -> dict[str, list[int]]:
    """Return the bytes of this rank's part of each collective, by kind."""
    kinds = ("gather", "reduce", "all-reduce")
    events = [event for event in log if isinstance(event, Event) and event.what in kinds]
    return {
        kind: [event.nbytes for event in events if event.what == kind]
        for kind in kinds
        if any(event.what == kind for event in events)
    }


def in_words(log: list[Any], model: nn.Module) -> list[str]:
    """Return the log with each collective as "gather UNIT", by the sizes of a model's flat
    parameters, which have to differ. UNIT: the last part of the unit's name."""
    units = {}
    for name, parameter in model.named_parameters():
        *_, units[parameter.numel()] = ["root", *_own_names(name)]
    assert len(units) == len(list(model.parameters()))
    return [
        f"{event.what} {units[event.numel]}" if isinstance(event, Event) else event for event in log
    ]


def _own_names(name: str) -> list[str]:
    return [part for part in name.split(".")[:-1] if part != "_fsdp_wrapped_module"]
