"""Writing a checkpoint of torch.distributed.checkpoint, chunk by chunk.

Of torch's save only the file format and the plan are used: its planner wants all values in memory
at once, and one rank per process."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import io
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..._layout.box import Box
from ...errors import UsageError
from .archive import Archive, StoredTensor, whole
from .reading import Files, read, read_box
from .writing import WriteOptions, dtype_to_write

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import SavePlan, WriteItem

_Keys = tuple[str | int, ...]
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.Size)
_PLAIN += (datetime.datetime, datetime.timedelta)  # type: ignore[assignment]


def write_dcp(archive: Archive, path: Path, options: WriteOptions, files: Files) -> None:
    """Write ``archive`` as a directory that ``torch.distributed.checkpoint`` loads: into FSDP1's
    SHARDED state dicts, FSDP2 and this package's front ends, on any number of ranks.

    An archive of nothing but a model becomes a flat state dict:

        state = get_model_state_dict(model)
        dcp.load(state, checkpoint_id=path)

    With an optimizer or other values, the model is under "model", the optimizer under
    "optimizer", as ``get_optimizer_state_dict`` gives it, and other values are beside them:

        state = {"model": ..., "optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.load(state, checkpoint_id=path)

    Tensors are cut along their first dim as for ``options.world_size`` ranks, one file per rank,
    and further into chunks of at most ``options.slab_nbytes`` where rows are not larger than that;
    a worker has one chunk in memory. Tied tensors are written under each of their names. Values
    that are neither tensors nor plain are not written, and named in ``archive.left_out``.

    Imports torch.distributed.checkpoint, which may import torch.distributed.fsdp. Raises UsageError
    if two values would get one name, CheckpointError for damaged sources, and OSError.
    """
    from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
    from torch.distributed.checkpoint.planner import SavePlan

    values = _flattened(archive)
    ranks: list[list[WriteItem]] = [[] for _ in range(options.world_size)]
    for name, (_, value) in values.items():
        for rank, item in _items(name, value, options):
            ranks[rank].append(item)
    plans, metadata = create_default_global_save_plan([SavePlan(items) for items in ranks])
    metadata.planner_data = {name: keys for name, (keys, _) in values.items()}
    threads = -(-options.workers // options.world_size)
    writer = _writer(path, threads)
    writer.set_up_storage_writer(True)
    plans = writer.prepare_global_plan([writer.prepare_local_plan(plan) for plan in plans])
    planner: Any = _Resolver(values, files, options)  # a writer calls no other method of it

    def write(plan: SavePlan) -> list[Any]:
        # A call holds all its values until it ends, so it gets one per thread.
        results: list[Any] = []
        for start in range(0, len(plan.items), threads):
            items = plan.items[start : start + threads]
            written = writer.write_data(dataclasses.replace(plan, items=items), planner).wait()
            planner.require_all(len(items), len(written), path)
            results += written
        return results

    with ThreadPoolExecutor(max(1, options.workers // threads)) as pool:
        all_results = list(pool.map(write, plans))
    for file in path.iterdir():
        with open(file, "rb") as opened:
            os.fsync(opened.fileno())
    writer.finish(metadata, all_results)


def _writer(path: Path, threads: int) -> Any:
    """Return a writer whose calls each add to the files that are there."""
    from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter

    class Appending(FileSystem):
        @contextlib.contextmanager
        def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
            with open(path, "ab" if Path(path).suffix == ".distcp" else mode) as stream:
                yield stream
                if Path(path).suffix != ".distcp":
                    stream.flush()
                    os.fsync(stream.fileno())

    class Writer(FileSystemWriter):
        def storage_meta(self) -> None:
            """Nothing: the path would be the one before the directory gets its name."""

    # No copying ahead: values are on the CPU already.
    writer = Writer(path, sync_files=False, thread_count=threads, per_thread_copy_ahead=0)
    writer.fs = Appending()
    return writer


class _Resolver:
    """Reads the value of each chunk when it is about to be written: the part of torch's SavePlanner
    that a writer calls."""

    def __init__(
        self, values: dict[str, tuple[_Keys, Any]], files: Files, options: WriteOptions
    ) -> None:
        self._values, self._files, self._options = values, files, options
        self._errors: list[BaseException] = []

    def resolve_data(self, item: WriteItem) -> torch.Tensor | io.BytesIO:
        try:
            return self._resolved(item)
        except BaseException as error:
            self._errors.append(error)  # torch's threads would drop it
            raise

    def _resolved(self, item: WriteItem) -> torch.Tensor | io.BytesIO:
        value = self._values[item.index.fqn][1]
        if item.tensor_data is None:
            stream = io.BytesIO()
            torch.save(_with_tensors(value, self._files), stream)
            stream.seek(0)
            return stream
        chunk = item.tensor_data.chunk
        box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
        tensor = read_box(value, box, self._files).to(dtype_to_write(value))
        self._options.tick(tensor.nbytes)
        return tensor

    def require_all(self, num_items: int, num_results: int, path: Path) -> None:
        """Raise the error of a thread if not all items were written."""
        if self._errors:
            raise self._errors[0]
        if num_results != num_items:
            raise OSError(f"{num_items - num_results} values could not be written to {path}")


# -- what is written


def _flattened(archive: Archive) -> dict[str, tuple[_Keys, Any]]:
    """Return every value by its name in the checkpoint, with its path in the nested state dict."""
    model = {**archive.tensors}
    for alias, name in archive.aliases.items():
        model[alias] = archive.tensors[name]
    entries: dict[str, tuple[_Keys, Any]] = {}
    has_optimizer = archive.param_groups is not None or bool(archive.states)
    if not has_optimizer and not archive.extra:
        for name, tensor in model.items():
            _add(entries, (name,), tensor)
        return entries
    for name, tensor in model.items():
        _add(entries, ("model", name), tensor)
    if has_optimizer:
        for name, states in archive.states.items():
            for key, value in states.items():
                _walk(entries, ("optimizer", "state", name, str(key)), value, archive.left_out)
        for number, group in enumerate(archive.param_groups or ()):
            if archive.is_by_number:
                group = {**group, "params": [int(name) for name in group["params"]]}
            _walk(entries, ("optimizer", "param_groups", number), group, archive.left_out)
    for key, value in archive.extra.items():
        _walk(entries, (key,), value, archive.left_out)
    if archive.step is not None and ("step",) not in {keys for keys, _ in entries.values()}:
        _add(entries, ("step",), archive.step)
    return entries


def _walk(
    entries: dict[str, tuple[_Keys, Any]], keys: _Keys, value: Any, left_out: list[str]
) -> None:
    """Add a value, or what is in it: in mappings, and in lists that hold tensors or mappings."""
    if isinstance(value, dict):
        for key, item in value.items():
            _walk(entries, (*keys, str(key)), item, left_out)
    elif isinstance(value, list) and any(_is_nested(item) for item in value):
        for number, item in enumerate(value):
            _walk(entries, (*keys, number), item, left_out)
    elif isinstance(value, StoredTensor) or _is_plain(value):
        _add(entries, keys, value)
    else:
        left_out.append(f"{'.'.join(map(str, keys))}, a {type(value).__name__}")


def _is_nested(value: Any) -> bool:
    if isinstance(value, list):
        return any(_is_nested(item) for item in value)
    return isinstance(value, (StoredTensor, dict))


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(_is_plain(item) or isinstance(item, StoredTensor) for item in value)
    if isinstance(value, dict):
        return all(_is_plain(key) and _is_plain(item) for key, item in value.items())
    return type(value) in _PLAIN


def _add(entries: dict[str, tuple[_Keys, Any]], keys: _Keys, value: Any) -> None:
    name = ".".join(map(str, keys))
    if name in entries:
        raise UsageError.of(
            "Two values would get the same name in the checkpoint.",
            expected="paths that differ when they are joined by dots",
            got=f"{list(entries[name][0])} and {list(keys)}",
            where="torch.distributed.checkpoint as the target",
            fix="rename one of them, or leave it out",
        )
    entries[name] = keys, value


def _with_tensors(value: Any, files: Files) -> Any:
    """Return a plain value with the tensors in it read."""
    if isinstance(value, StoredTensor):
        return read(value, files)
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        items = [_with_tensors(item, files) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value


# -- chunks


def _items(name: str, value: Any, options: WriteOptions) -> Iterator[tuple[int, WriteItem]]:
    """Yield what each rank writes of a value."""
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        MetadataIndex,
        TensorProperties,
    )
    from torch.distributed.checkpoint.planner import (
        BytesIOWriteData,
        TensorWriteData,
        WriteItem,
        WriteItemType,
    )

    if not isinstance(value, StoredTensor):
        data = BytesIOWriteData(0)
        yield 0, WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO, bytes_io_data=data)
        return
    properties = TensorProperties(dtype=dtype_to_write(value))
    for rank, box in _boxes(value, options):
        offsets = torch.Size(box.offsets)
        chunk = ChunkStorageMetadata(offsets, torch.Size(box.sizes))
        written = TensorWriteData(chunk, properties, torch.Size(value.shape))
        index = MetadataIndex(name, offsets)
        yield rank, WriteItem(index, WriteItemType.SHARD, tensor_data=written)


def _boxes(tensor: StoredTensor, options: WriteOptions) -> Iterator[tuple[int, Box]]:
    """Yield the chunks of a tensor with their ranks, which hold rows as torch.chunk cuts them."""
    if not tensor.shape or not tensor.numel:
        yield 0, whole(tensor.shape)
        return
    rows, *rest = tensor.shape
    share = -(-rows // options.world_size)
    row_nbytes = tensor.nbytes // rows
    at_once = max(options.slab_nbytes // max(row_nbytes, 1), 1)
    for rank, first in enumerate(range(0, rows, share)):
        stop = min(first + share, rows)
        for start in range(first, stop, at_once):
            sizes = (min(at_once, stop - start), *rest)
            yield rank, Box((start, *(0,) * len(rest)), sizes)
