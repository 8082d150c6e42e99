"""Flat parameters in per-rank files: those of FSDP1's local state dicts.

A flat parameter is the parameters of one wrapper one after the other, and each rank has a part of
it. The files do not say which parameters these are: names and shapes come from elsewhere, and must
add up to the size of the flat parameter."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..._comm.host_memory import memory_of
from ..._layout.box import Box, cut_into_boxes
from ..._layout.spec import Interval, ParamSpec
from ...errors import CheckpointError
from .._texts import joined
from .archive import Span, StoredTensor
from .merging import disagreement
from .reading import Files, read, read_box
from .shapes import Shapes
from .sharded_records import ShardedTensorRecord, run_part
from .tree import plain_name

_FLAT = re.compile(r"_?flat_param(_\d+)?")  # with a number: a unit with several of them
_MAX_LEVELS = 4
_PADDING = 42  # torch fills gaps with this value
_ALIGN_NBYTES = 16
_ITEM_SIZES = (8, 4, 2, 1)  # of the dtypes that gaps may have been made for


def holds_flat_params(tree: Any) -> bool:
    """Return whether one rank's values hold flat parameters that ``unflattened`` knows."""
    return any(_is_local(node) for _, node in _dicts(tree, 0))


def unflattened(trees: Mapping[int, Any], shapes: Shapes | None, where: Path) -> dict[int, Any]:
    """Return the values of all ranks with this rank's parts of the parameters in the place of flat
    parameters. Raises CheckpointError; OSError."""
    places = {rank: dict(_dicts(tree, 0)) for rank, tree in trees.items()}
    first = next(iter(places.values()))
    with Files() as files:
        for path, node in first.items():
            if not _is_local(node):
                continue
            if not all(path in found for found in places.values()):
                raise disagreement(where, "/".join(path), "the same values on all ranks", "fewer")
            nodes = {rank: found[path] for rank, found in places.items()}
            _Local(nodes, shapes, where, files).unflatten()
    return dict(trees)


def _dicts(tree: Any, depth: int) -> Iterator[tuple[tuple[str, ...], dict[Any, Any]]]:
    """Yield the mappings of the upper levels, with their paths."""
    if isinstance(tree, dict) and depth < _MAX_LEVELS:
        yield (), tree
        for key, value in tree.items():
            for path, node in _dicts(value, depth + 1):
                yield (str(key), *path), node


# -- FSDP1


def _is_flat(key: object, value: Any) -> bool:
    is_name = _FLAT.fullmatch(str(key).rpartition(".")[2]) is not None
    return is_name and isinstance(value, ShardedTensorRecord) and len(value.shape) == 1


def _is_local(node: dict[Any, Any]) -> bool:
    return any(_is_flat(key, value) for key, value in node.items())


@dataclasses.dataclass(frozen=True)
class _Layout:
    """Where the parameters are in a flat one."""

    params: tuple[ParamSpec, ...]
    numel: int

    def gaps(self) -> list[Interval]:
        found, end = [], 0
        for param in self.params:
            found.append(Interval(end, param.start))
            end = param.place.stop
        return [gap for gap in (*found, Interval(end, self.numel)) if gap]


class _Local:
    """A local state dict of all ranks."""

    def __init__(
        self, nodes: Mapping[int, dict[Any, Any]], shapes: Shapes | None, where: Path, files: Files
    ) -> None:
        self._nodes, self._shapes, self._where, self._files = nodes, shapes, where, files
        self._ties = {} if shapes is None else dict(shapes.ties)
        first = next(iter(nodes.values()))
        self._keys = [key for key, value in first.items() if _is_flat(key, value)]
        self._prefixes = {key: plain_name(str(key)).rpartition(".")[0] for key in self._keys}

    def unflatten(self) -> None:
        """Replace the flat parameters by the parts of the parameters, in each rank's mapping."""
        for key in self._keys:
            records = {}
            for rank, node in self._nodes.items():
                value = node.pop(key, None)
                if not isinstance(value, ShardedTensorRecord):
                    raise disagreement(
                        self._where, str(key), "a flat parameter on all ranks", f"none on {rank}"
                    )
                records[rank] = value
            facts = {(record.shape, record.dtype) for record in records.values()}
            if len(facts) > 1:
                raise disagreement(
                    self._where, str(key), "one size and dtype", f"{len(facts)} of them"
                )
            layout = self._layout(key, records)
            params = {param.name: param for param in layout.params}
            params |= {name: params[first] for name, first in self._ties.items() if first in params}
            params |= self._names_of_parts(records, params)
            for rank, node in self._nodes.items():
                for other in [other for other in node if plain_name(str(other)) in params]:
                    del node[other]  # with use_orig_params=True, views of the same values
                for name, param in params.items():
                    node[name] = _part_of_flat(records[rank], param)

    def _names_of_parts(
        self, records: Mapping[int, ShardedTensorRecord], params: Mapping[str, ParamSpec]
    ) -> dict[str, ParamSpec]:
        """Return the parameters by the names of entries that view their memory. With
        use_orig_params=True each has such entries, and a tied one has several."""
        found = {}
        for rank, node in self._nodes.items():
            starts = {}
            for param in params.values():
                shards = _part_of_flat(records[rank], param).shards
                if shards and (start := _start_of(shards[0][1])) is not None:
                    starts[start] = param
            for other, value in node.items():
                start = _start_of(value) if isinstance(value, StoredTensor) else None
                if start is not None and start in starts:
                    found[plain_name(str(other))] = starts[start]
        return found

    def _layout(self, key: Any, records: Mapping[int, ShardedTensorRecord]) -> _Layout:
        first = next(iter(records.values()))
        (numel,) = first.shape
        if first.inside is not None:
            prefix = self._prefixes[key]
            params = [
                dataclasses.replace(param, name=_under(prefix, plain_name(param.name)))
                for param in first.inside.params
            ]
            return _Layout(tuple(params), numel)
        names = self._names(key)
        fitting = self._fitting(names, numel, records)
        if not fitting and (ties := self._ties_by_value(names, numel)):
            without = [[name for name in some if name not in ties] for some in names]
            fitting = self._fitting(without, numel, records)
            self._ties |= ties if fitting else {}
        if len(fitting) != 1:
            raise self._does_not_fit(key, names, numel, len(fitting))
        if self._shapes is not None and not self._shapes.is_ordered and len(names[0]) > 1:
            raise self._unordered(key, names[0])
        return fitting[0]

    def _names(self, key: Any) -> list[list[str]]:
        """Return the names of the parameters that a flat one may hold, the likeliest first."""
        prefix = self._prefixes[key]
        if self._shapes is None:
            return []
        inner = [
            other for other in self._prefixes.values() if other != prefix and _is_in(other, prefix)
        ]
        all_names = [
            name
            for name, shape in self._shapes.entries.items()
            if shape.is_buffer is not True
            and _is_in(name, prefix)
            and not any(_is_in(name, other) for other in inner)
        ]
        plain = [
            {
                plain_name(str(key)): value.shape
                for key, value in node.items()
                if isinstance(value, StoredTensor)
            }
            for node in self._nodes.values()
        ]
        flattened = [
            name
            for name in all_names
            if any(shapes.get(name) != self._shapes.entries[name].sizes for shapes in plain)
        ]
        return [flattened] if flattened == all_names else [flattened, all_names]

    def _ties_by_value(self, names: list[list[str]], numel: int) -> dict[str, str]:
        """Return matrices that have the values of an earlier one where the shapes come from, with
        the name of that one: torch's full state dicts do not say which parameters are tied.

        Vectors are often equal by chance. Only matrices are read that are small enough to be what
        is too much.
        """
        if self._shapes is None or self._shapes.source is None:
            return {}
        stored = self._shapes.source.tensors
        ties: dict[str, str] = {}
        for some in names:
            gaps = _ALIGN_NBYTES * (len(some) + len(self._nodes))
            most = sum(stored[name].numel for name in some) - numel + gaps
            firsts: dict[Any, str] = {}
            for name in some:
                tensor = stored[name]
                if len(tensor.shape) > 1 and 0 < tensor.numel <= most:
                    digest = hashlib.blake2b(memory_of(read(tensor, self._files))).digest()
                    first = firsts.setdefault((tensor.dtype, tensor.shape, digest), name)
                    ties |= {name: first} if name != first else {}
        return ties

    def _fitting(
        self, names: list[list[str]], numel: int, records: Mapping[int, ShardedTensorRecord]
    ) -> list[_Layout]:
        """Return the layouts whose sizes add up, with padding where they have gaps."""
        layouts = dict.fromkeys(self._candidates(names, numel))
        return [layout for layout in layouts if self._is_padded(layout, records)]

    def _candidates(self, names: list[list[str]], numel: int) -> Iterator[_Layout]:
        """Yield the layouts whose sizes add up."""
        assert self._shapes is not None or not names
        for some in names:
            for align in (1, *(_ALIGN_NBYTES // size for size in _ITEM_SIZES)):
                params, end = [], 0
                for name in some:
                    shape = self._shapes.entries[name].sizes  # type: ignore[union-attr]
                    start = -(-end // align) * align
                    params.append(ParamSpec(name, shape, start))
                    end = start + math.prod(shape)
                rest = numel - end
                if rest == 0 or (align > 1 and 0 < rest < len(self._nodes)):
                    yield _Layout(tuple(params), numel)

    def _is_padded(self, layout: _Layout, records: Mapping[int, ShardedTensorRecord]) -> bool:
        """Return whether there is padding in all gaps, and none at the ends of parameters."""
        gaps = layout.gaps()
        ends = [param.place.stop for param in layout.params if param.numel] if gaps else []
        return all(self._is_filled(gap, records) for gap in gaps) and not any(
            self._is_filled(Interval(end - 1, end), records) for end in ends
        )

    def _is_filled(self, part: Interval, records: Mapping[int, ShardedTensorRecord]) -> bool:
        """Return whether these elements of a flat parameter are padding."""
        for record in records.values():
            for box, values in record.shards:
                at = Interval(box.offsets[0], box.offsets[0] + box.numel)
                common = at.clipped(part)
                if not common:
                    continue
                place = Box((common.start - at.start,), (common.numel,))
                if not bool((read_box(values, place, self._files) == _PADDING).all()):
                    return False
        return True

    def _does_not_fit(
        self, key: Any, names: list[list[str]], numel: int, num: int
    ) -> CheckpointError:
        if self._shapes is None:
            got = "no shapes: local state dicts of FSDP1 do not hold them"
        elif num:
            got = f"{num} ways to lay out its parameters in {numel} elements"
        else:
            found = names[0] if names else []
            sizes = [math.prod(self._shapes.entries[name].sizes) for name in found]
            parts = [f"{name} {size}" for name, size in zip(found, sizes, strict=True)]
            got = (
                f"{numel} elements, but its {len(parts)} parameters have {sum(sizes)}: "
                f"{joined(parts, 20, ', ')}"
            )
        return self._unclear(
            f"The parameters in {key} cannot be told apart.",
            "the shapes of the model that was wrapped, which add up",
            got,
            "; or a full checkpoint of the same model",
        )

    def _unordered(self, key: Any, names: list[str]) -> CheckpointError:
        return self._unclear(
            f"The order of the parameters in {key} is not known.",
            "shapes in the order of the modules",
            f"those of a safetensors file, which sorts them: {', '.join(names[:4])}, ...",
        )

    def _unclear(self, what: str, expected: str, got: str, or_pass: str = "") -> CheckpointError:
        return CheckpointError.of(
            what,
            expected=expected,
            got=got,
            where=str(self._where),
            fix="write the shapes with `fsdp-compat shapes my.module:make_model -o "
            f"model.json`, and pass --shapes model.json{or_pass}",
        )


def _is_in(name: str, prefix: str) -> bool:
    return not prefix or name == prefix or name.startswith(f"{prefix}.")


def _under(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _part_of_flat(record: ShardedTensorRecord, param: ParamSpec) -> ShardedTensorRecord:
    """Return one rank's part of a parameter in a flat one."""
    shards = []
    for box, values in record.shards:
        start = box.offsets[0]
        common = Interval(start, start + box.numel).clipped(param.place)
        at = common.start - start
        for each in cut_into_boxes(param.shape, common.shifted(-param.start)) if common else ():
            shards.append((each, run_part(values, Interval(at, at + each.numel), each.sizes)))
            at += each.numel
    return ShardedTensorRecord(param.shape, record.dtype, tuple(shards), ())


def _start_of(value: StoredTensor) -> tuple[Path, int] | None:
    """Return where in a file the elements of a tensor begin, if it has any there."""
    source = value.pieces[0].source if value.pieces and value.numel else None
    return (source.path, source.start) if isinstance(source, Span) else None
