"""torch.distributed.checkpoint.HuggingFaceStorageWriter, taught that a rank may hold several pieces
of one tensor.

It writes one safetensors file per rank, in which a name stands once: of several pieces of a tensor
the last one would stay, and no error would say so. A rank's part of a parameter is several boxes,
so each further piece goes into a further file of the rank. Torch's reader and its consolidation go
by the offsets in every file of the directory, and find them there. What has one piece per name, as
every other kind of value, is written as torch wrote it."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable
from typing import Any

from torch.futures import Future

from ..errors import CheckpointError, explain
from .on_import import cancel, on_import

if typing.TYPE_CHECKING:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

__all__ = ["patch", "undo"]

_FILES_OF_FIRST_PIECES = (
    100_000  # the writer counts ranks from 1; further pieces count from here on, by rank again
)


_MODULE = "torch.distributed.checkpoint.hf_storage"
_undo: list[Callable[[], None]] = []


def patch() -> None:
    """Replace two methods of the writer's class, now or as soon as its module is imported."""
    on_import(_MODULE, _replace)


def undo() -> None:
    """Give the class its methods back."""
    cancel(_MODULE)
    while _undo:
        _undo.pop()()


def _replace(module: types.ModuleType) -> None:
    writer = module.HuggingFaceStorageWriter
    for name, ours in (("prepare_global_plan", _prepare_global_plan), ("write_data", _write_data)):
        original = getattr(writer, name)
        setattr(writer, name, _around(original, ours))
        _undo.append(functools.partial(setattr, writer, name, original))


def _around(original: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return ours(functools.partial(original, self), self, *args, **kwargs)

    return method


def _prepare_global_plan(
    original: Callable[..., list[SavePlan]], writer: HuggingFaceStorageWriter, plans: list[SavePlan]
) -> list[SavePlan]:
    """On the coordinator, before anything is written: what it raises, all ranks raise."""
    for rank, plan in enumerate(plans):
        parts = _without_repetition(plan.items, None)
        if len(parts) > 1 and (not writer.save_distributed or len(plans) >= _FILES_OF_FIRST_PIECES):
            raise CheckpointError(
                explain(
                    "Sharded values cannot be written into one safetensors file.",
                    expected="HuggingFaceStorageWriter(..., save_distributed=True), and fewer "
                    f"than {_FILES_OF_FIRST_PIECES} ranks",
                    got=f"save_distributed={writer.save_distributed}, {len(plans)} ranks, and "
                    "several pieces of "
                    f"{parts[1][0].index.fqn!r} on rank {rank}",
                    where="torch.distributed.checkpoint.save",
                    fix="set save_distributed=True, or save a full state dict "
                    "(StateDictType.FULL_STATE_DICT) from one rank",
                )
            )
    return original(plans)


def _write_data(
    original: Callable[..., Future[Any]],
    writer: HuggingFaceStorageWriter,
    plan: SavePlan,
    planner: SavePlanner,
) -> Future[Any]:
    parts = _without_repetition(plan.items, planner)
    if len(parts) <= 1 or "shard_index" not in plan.storage_data:
        return original(plan, planner)
    results: list[Any] = []
    for number, items in enumerate(parts):
        file_index = plan.storage_data["shard_index"] + number * _FILES_OF_FIRST_PIECES
        part = dataclasses.replace(
            plan, items=items, storage_data={**plan.storage_data, "shard_index": file_index}
        )
        results += original(part, planner).wait()
    done: Future[Any] = Future()
    done.set_result(results)
    return done


def _without_repetition(
    items: list[WriteItem], planner: SavePlanner | None
) -> list[list[WriteItem]]:
    """Part items so that no part has two of one name or, where the ``planner`` is there to give the
    data, of one memory: a tied parameter's, which safetensors refuses to write twice."""
    parts: list[list[WriteItem]] = []
    taken: list[set[str | int]] = []
    for item in items:
        own: set[str | int] = {item.index.fqn}
        if planner is not None and item.type.name == "SHARD":
            data: Any = planner.resolve_data(item)
            own |= {data.data_ptr()} if data.numel() else set()
        number = next((number for number, its in enumerate(taken) if not its & own), len(parts))
        if number == len(parts):
            parts.append([])
            taken.append(set())
        parts[number].append(item)
        taken[number] |= own
    return parts
