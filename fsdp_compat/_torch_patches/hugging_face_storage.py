"""Make torch.distributed.checkpoint.HuggingFaceStorageWriter write several shards of one tensor per
rank.

The writer makes one safetensors file per rank. A name can occur in it only once, so if a rank holds
several shards of a tensor, only the last one would be saved, without an error. Here a rank's part
of a parameter can be several shards, so each further one goes into another file of the rank.
Torch's reader and its consolidation use the offsets in all files of the directory, and so find
them. If each name has one shard, the writer works unchanged."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable
from typing import Any

from torch.futures import Future

from ..errors import CheckpointError
from .patches import PatchOnImport, Undo, around_method

if typing.TYPE_CHECKING:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

# The writer numbers its files by rank, from 1. The number of a rank's k-th further file is larger
# by k times this.
_FILES_OF_FIRST_PIECES = 100_000

_MODULE = "torch.distributed.checkpoint.hf_storage"


def _replace(module: types.ModuleType) -> list[Undo]:
    writer = module.HuggingFaceStorageWriter
    return [
        around_method(writer, "prepare_global_plan", _prepare_global_plan),
        around_method(writer, "write_data", _write_data),
    ]


def _prepare_global_plan(
    original: Callable[..., list[SavePlan]], writer: HuggingFaceStorageWriter, plans: list[SavePlan]
) -> list[SavePlan]:
    """Check the plans on the coordinator, before anything is written. All ranks raise its error."""
    for rank, plan in enumerate(plans):
        parts = _without_repetition(plan.items, None)
        if len(parts) > 1 and (not writer.save_distributed or len(plans) >= _FILES_OF_FIRST_PIECES):
            raise CheckpointError.of(
                "Sharded values cannot be written into one safetensors file.",
                expected="HuggingFaceStorageWriter(..., save_distributed=True), and fewer "
                f"than {_FILES_OF_FIRST_PIECES} ranks",
                got=f"save_distributed={writer.save_distributed}, {len(plans)} ranks, and "
                f"several shards of {parts[1][0].index.fqn!r} on rank {rank}",
                where="torch.distributed.checkpoint.save",
                fix="set save_distributed=True, or save a full state dict "
                "(StateDictType.FULL_STATE_DICT) from one rank",
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
        data = {**plan.storage_data, "shard_index": file_index}
        part = dataclasses.replace(plan, items=items, storage_data=data)
        results += original(part, planner).wait()
    done: Future[Any] = Future()
    done.set_result(results)
    return done


def _without_repetition(
    items: list[WriteItem], planner: SavePlanner | None
) -> list[list[WriteItem]]:
    """Split the items into parts without two of a name and, with a ``planner``, without the same
    memory twice, as of tied ones, which safetensors refuses."""
    parts: list[list[WriteItem]] = []
    taken: list[set[str | int]] = []
    for item in items:
        own: set[str | int] = {item.index.fqn}
        if planner is not None and item.type.name == "SHARD":
            data: Any = planner.resolve_data(item)
            own |= {data.data_ptr()} if data.numel() else set()
        number = next((number for number, used in enumerate(taken) if not used & own), len(parts))
        if number == len(parts):
            parts.append([])
            taken.append(set())
        parts[number].append(item)
        taken[number] |= own
    return parts


patches = PatchOnImport(_MODULE, _replace)
