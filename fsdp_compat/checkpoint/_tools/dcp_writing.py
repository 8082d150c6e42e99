"""Writing a checkpoint of torch.distributed.checkpoint, chunk by chunk.

torch's own writer wants all values of a file in memory at once, and one rank per process. So only
the format is torch's: its metadata, and chunks that torch.save writes one after the other."""

from __future__ import annotations

import datetime
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ..._layout.box import Box
from ..._torch_private import place_in_file
from ...errors import UsageError
from .._blocks import sync_directory
from .archive import Archive, StoredTensor, whole
from .reading import Files, read, read_box
from .walk import map_leaves
from .work import for_each
from .writing import WriteOptions, dtype_to_write

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
    a worker writes one file at a time, and has one chunk in memory. Tied tensors are written under
    each of their names. Values that are neither tensors nor plain are not written, and named in
    ``archive.left_out``.

    Imports torch.distributed.checkpoint, which may import torch.distributed.fsdp. Raises UsageError
    if two values would get one name, CheckpointError for damaged sources, and OSError.
    """
    from torch.distributed.checkpoint import metadata as described

    values = _flattened(archive)
    entries: dict[str, Any] = {}
    ranks: list[list[tuple[Any, Any, Box | None]]] = [[] for _ in range(options.world_size)]
    for name, (_, value) in values.items():
        if not isinstance(value, StoredTensor):
            entries[name] = described.BytesStorageMetadata()
            ranks[0].append((described.MetadataIndex(name), value, None))
            continue
        chunks = []
        for rank, box in _boxes(value, options):
            offsets = torch.Size(box.offsets)
            chunks.append(described.ChunkStorageMetadata(offsets, torch.Size(box.sizes)))
            ranks[rank].append((described.MetadataIndex(name, offsets), value, box))
        properties = described.TensorProperties(dtype_to_write(value))
        entries[name] = described.TensorStorageMetadata(properties, torch.Size(value.shape), chunks)

    def write(rank: int, tick: object) -> dict[Any, Any]:
        places: dict[Any, Any] = {}
        if ranks[rank]:
            name = f"__{rank}_0.distcp"
            with open(path / name, "xb") as file:
                for index, value, box in ranks[rank]:
                    start = file.tell()
                    torch.save(_chunk(value, box, files, options), file)
                    nbytes = file.tell() - start
                    places[index] = place_in_file(name, start, nbytes)
                file.flush()
                os.fsync(file.fileno())
        return places

    path.mkdir()
    written = for_each(range(options.world_size), write, workers=options.workers)
    paths: Any = {name: keys for name, (keys, _) in values.items()}
    places = {index: place for of_rank in written for index, place in of_rank.items()}
    with open(path / ".metadata", "xb") as file:
        pickle.dump(described.Metadata(entries, paths, places), file)
        file.flush()
        os.fsync(file.fileno())
    sync_directory(path)


def _chunk(value: Any, box: Box | None, files: Files, options: WriteOptions) -> Any:
    """Return what is saved of a value: a box of a tensor, or the value with the tensors in it."""
    if box is None:
        return map_leaves(
            value, lambda leaf, _: read(leaf, files) if isinstance(leaf, StoredTensor) else leaf
        )
    tensor = read_box(value, box, files).to(dtype_to_write(value))
    options.tick(tensor.nbytes)
    return tensor


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
