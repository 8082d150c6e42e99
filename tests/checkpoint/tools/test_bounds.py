"""What a small file can ask for is bounded: it is refused within seconds, and without much memory,
whatever it asks for. Each call has limits of its own, in a child process."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_compat._layout.box import Box
from fsdp_compat.checkpoint._tools.archive import coverage_problem, of_memory
from fsdp_compat.checkpoint._tools.pickles import Record, Refused
from fsdp_compat.checkpoint._tools.sharded_records import RankPart, boxed_tensor, d_tensor, shape_of
from fsdp_compat.checkpoint._tools.torch_save import unpickle
from fsdp_compat.checkpoint._tools.tree import archive_of
from fsdp_compat.errors import CheckpointError
from tests.checkpoint.tools.archives import record, spec_of
from tests.support.bounded import bounded

WHERE = Path("values.pkl")


def require_small(call: Callable[[], object], *errors: type[Exception]) -> None:
    """Require that a call raises one of the errors, or nothing if there is none, at little cost."""
    used = bounded(call)
    assert used.error in ({error.__name__ for error in errors} or {""}), used
    assert used.seconds < 5 and used.nbytes < 256 << 20, used


# -- shapes, meshes and placements


def a_size_of(nbytes: int) -> bytes:
    """A pickle of a torch.Size with one huge number, many times."""
    number = b"\x8a\xff" + b"\x7f" * 255
    return b"\x80\x02ctorch\nSize\n(" + number + b"q\x00" + b"h\x00" * (nbytes // 2) + b"t\x85R."


def test_sizes_are_refused_before_they_are_multiplied() -> None:
    data = a_size_of(400_000)
    require_small(lambda: unpickle(data, WHERE), CheckpointError)
    with pytest.raises(Refused):
        shape_of((1 << 59, 2))
    with pytest.raises(Refused):
        shape_of([1] * 65)
    assert shape_of((0, 1 << 59)) == (0, 1 << 59)


def spec(sizes: Any, shape: tuple[int, ...] = (6, 2), splits: tuple[int, ...] = ()) -> Record:
    """splits: of the strided placement along each dim of a tensor."""
    places = [("_StridedShard", number % len(shape), split) for number, split in enumerate(splits)]
    return spec_of(shape, sizes, [0] * max(len(splits), 1), places)


@pytest.mark.parametrize("number", [2, ()], ids=["numbers", "empty"])
def test_nested_sizes_of_a_mesh_are_refused_before_they_are_followed(number: Any) -> None:
    nested: Any = number
    for _ in range(7):
        nested = (nested,) * 60
    local = of_memory("", torch.ones(6, 2))
    require_small(lambda: d_tensor(local, spec((nested,))), Refused)
    require_small(lambda: d_tensor(local, spec([2] * 65)), Refused, ValueError)


def strided(*splits: int) -> RankPart:
    num = len(splits)
    local = of_memory("", torch.empty(()).expand((4096,) * num))
    return d_tensor(local, spec((2,) * num, (8192,) * num, splits))


def test_splits_of_several_dims_are_refused_before_they_are_multiplied() -> None:
    require_small(lambda: strided(4096, 4096), Refused)
    require_small(lambda: strided(256, 256, 4), Refused)
    repeated = spec((2,) * 60, (1 << 40,), (512,) * 60)
    require_small(lambda: d_tensor(of_memory("", torch.empty(())), repeated), Refused)
    assert len(strided(8, 8).pieces) == 8 * 8


def test_many_tensors_with_splits_take_little_time_and_memory_each() -> None:
    """As tensor parallelism inside FSDP has them, and the most that are not refused."""
    require_small(lambda: [strided(16) for _ in range(1000)])
    require_small(lambda: [strided(128) for _ in range(300)])


def test_a_tensor_of_columns_is_checked_as_fast_as_one_of_rows() -> None:
    columns = [Box((0, at), (4, 1)) for at in range(20_000)]
    require_small(lambda: coverage_problem((4, 20_000), columns))
    assert coverage_problem((4, 20_000), columns) is None
    columns[7] = Box((0, 6), (4, 2))
    assert "overlap" in str(coverage_problem((4, 20_000), columns))


def test_our_sharded_tensors_of_many_ranks_are_read() -> None:
    spec = "fsdp_compat._layout.spec."
    params = (record(f"{spec}ParamSpec", name="w", shape=(64,), start=0),)
    layout = record(f"{spec}FlatLayout", params=params, ranks=64, shard_numel=1)
    found = boxed_tensor(layout, 0, 5, of_memory("", torch.ones(1)), tuple(range(64)))
    assert [piece.box for piece in found.pieces] == [Box((5,), (1,))]


# -- pickled values


def load_or_refuse(data: bytes) -> None:
    with contextlib.suppress(CheckpointError):
        archive_of(WHERE, "test", unpickle(data, WHERE))


def test_pairs_of_an_ordered_dict_are_not_copied_for_each_reference() -> None:
    long = b"](" + b"K\x01" * 100_000 + b"eq\x000"
    pairs = b"](" + b"h\x00" * 100_000 + b"e"
    data = b"\x80\x02" + long + b"ccollections\nOrderedDict\n" + pairs + b"\x85R."
    require_small(lambda: load_or_refuse(data))


def test_keys_of_one_text_many_times_are_not_written_out() -> None:
    long = b"X" + struct.pack("<I", 1_000_000) + b"a" * 1_000_000 + b"q\x000"
    keys = b"".join(b"(" + b"h\x00" * 60 + b"K%ct" % number + b"N" for number in range(250))
    data = b"\x80\x02" + long + b"}(" + keys + b"u."
    require_small(lambda: load_or_refuse(data))


def test_arrays_that_share_their_content_are_not_copied_for_each() -> None:
    content = b"B" + struct.pack("<I", 1 << 20) + bytes(1 << 20)
    one = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85C\x01b\x87R"
        b"(K\x01J\x00\x00\x10\x00\x85cnumpy\ndtype\nX\x02\x00\x00\x00u1\x85R\x89h\x00tb"
    )
    data = b"\x80\x03" + content + b"q\x000](" + one * 3000 + b"e."
    require_small(lambda: load_or_refuse(data))
