"""Pickles are read as data: plain values come back as they were, and nothing else happens,
whatever the bytes are. What a small file can ask for is bounded: it is refused within seconds and
without much memory, as child processes with limits show."""

from __future__ import annotations

import argparse
import collections
import contextlib
import datetime
import os
import pathlib
import pickle
import struct
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from fsdp_compat.checkpoint.files import convert, inspect
from fsdp_compat.errors import CheckpointError
from tests.checkpoint.tools.content import content_of, d_tensor, save_pickle
from tests.support.bounded import bounded
from tests.support.sampling import at_most


def unpickled(value: Any, protocol: int = 4) -> Any:
    """What becomes of a pickled value in a conversion that keeps all values as they were saved."""
    with tempfile.TemporaryDirectory() as folder:
        path = save_pickle(Path(folder, "x.pt"), pickle.dumps({"value": value}, protocol))
        written = convert(path, Path(folder, "y.pt"), as_saved=True)
        return torch.load(written, weights_only=False)["value"]


_KEYS = st.one_of(st.text(), st.integers(-1000, 1000), st.tuples(st.text(), st.integers()))
VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.integers(-(2**2000), 2**2000),
        st.floats(allow_nan=False),
        st.complex_numbers(allow_nan=False),
        st.text(),
        st.binary(),
        st.frozensets(st.integers()),
        st.sets(st.text()),
    ),
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.dictionaries(_KEYS, inner),
        st.dictionaries(st.text(), inner).map(collections.OrderedDict),
    ),
    max_leaves=20,
)


@given(VALUES, st.integers(2, 5))
@settings(max_examples=at_most(40, of_all=150), deadline=None)
def test_plain_values_come_back_as_they_were(value: Any, protocol: int) -> None:
    assert unpickled(value, protocol) == value


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (argparse.Namespace(lr=0.1, betas=(1, 2)), {"lr": 0.1, "betas": (1, 2)}),
        (collections.defaultdict(list, {"a": [1]}), {"a": [1]}),
        (collections.Counter("aab"), {"a": 2, "b": 1}),
        (collections.deque([1, 2], 5), [1, 2]),
        (datetime.timedelta(days=1, seconds=2), 86402.0),
        (datetime.datetime(2026, 1, 2, 3), "2026-01-02T03:00:00"),
        (pathlib.PurePosixPath("a/b.c"), "a/b.c"),
        (torch.Size([2, 3]), (2, 3)),
        (torch.bfloat16, torch.bfloat16),
        (torch.device("cuda", 1), "cuda:1"),
        (np.float32(1.5), 1.5),
        (np.bool_(True), True),
        (bytearray(b"ab"), bytearray(b"ab")),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_of_known_classes_become_plain_ones(
    value: Any, expected: Any, protocol: int
) -> None:
    assert unpickled(value, protocol) == expected


@pytest.mark.parametrize("dtype", ["f8", "u4", "i1", "?", "c8"])
def test_arrays_of_numbers_become_tensors(dtype: str, tmp_path: Path) -> None:
    orders: list[Any] = ["C", "F"]
    for order in orders:
        array = np.arange(6).reshape(2, 3).astype(dtype, order=order)
        for protocol in (2, 4, 5):
            path = save_pickle(tmp_path / "x.pt", pickle.dumps({"a": array}, protocol))
            found = content_of(path).model["a"]
            assert torch.equal(found, torch.from_numpy(np.ascontiguousarray(array)))


# -- hostile pickles


def _call(name: str, args: bytes) -> bytes:
    return b"\x80\x02c" + name.replace(" ", "\n").encode() + b"\n" + args + b"\x85R."


_TOUCH = b"X\x10\x00\x00\x00touch was_called"
_NESTED_TUPLES = b")" + b"\x85" * 200_000

HOSTILE = {
    "os.system": _call("os system", _TOUCH),
    "posix.system": _call("posix system", _TOUCH),
    "exec of Python 2": _call("__builtin__ exec", b"X\x01\x00\x00\x001"),
    "a dotted name": _call("torch os.system", _TOUCH),
    "a name inside a known class": _call("collections OrderedDict.__init__", b"]"),
    "getattr of a known class": (
        b"\x80\x02c__builtin__\ngetattr\nccollections\nOrderedDict\n"
        b"X\x09\x00\x00\x00__class__\x86R."
    ),
    "getattr of a value": b"\x80\x02c__builtin__\ngetattr\n]X\x06\x00\x00\x00append\x86R.",
    "a global name that is a number": b"\x80\x04K\x01K\x02\x93.",
    "a call of a call": b"\x80\x02cbuiltins\ngetattr\ncos\nsystem\nX\x01\x00\x00\x00a\x86R)R.",
    "a call of a list": b"\x80\x02])R.",
    "a call with a list": b"\x80\x02ctorch\nSize\n]R.",
    "a state for a class": b"\x80\x02ctorch\nFloatStorage\n}X\x01\x00\x00\x00aK\x01sb.",
    "slots for a class": b"\x80\x02cargparse\nNamespace\nN}X\x01\x00\x00\x00aK\x01s\x86b.",
    "a state for a function": b"\x80\x02ctorch\nSize\n}X\x0c\x00\x00\x00__setstate__K\x01sb.",
    "a state for a list": b"\x80\x02]}X\x01\x00\x00\x00aK\x01sb.",
    "elements for a record": b"\x80\x02cargparse\nNamespace\n)\x81K\x01a.",
    "items for a list": b"\x80\x02]K\x01K\x02s.",
    "a class as a value": b"\x80\x02ccollections\nOrderedDict\n.",
    "a class as a key": b"\x80\x02}ccollections\nOrderedDict\nK\x01s.",
    "a persistent id": b"\x80\x02K\x01Q.",
    "a persistent id as text": b"P1\n.",
    "an extension": b"\x80\x02\x82\x01.",
    "INST": b"(ios\nsystem\n.",
    "OBJ": b"(cos\nsystem\no.",
    "a tensor without a storage": (
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(NK\x00K\x01\x85K\x01\x85\x89}tR."
    ),
    "a storage inside": (
        b"\x80\x02ctorch.storage\n_load_from_bytes\nC\x01a\x85R."
    ),
    "an unknown memo index": b"\x80\x02j\xff\xff\xff\x7f.",
    "a giant text": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 62) + b"a.",
    "a giant bytearray": b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b".",
    "a negative int length": b"\x80\x02\x8b\xff\xff\xff\xff.",
    "a giant array": (
        b"\x80\x03cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85C\x01b\x87R"
        b"(K\x01J\xff\xff\xff\x7fJ\xff\xff\xff\x7f\x86cnumpy\ndtype\nX\x02\x00\x00\x00f8"
        b"\x85R\x89C\x00tb."
    ),
    "a giant shape": b"\x80\x02ctorch\nSize\n" + b"J\xff\xff\xff\x7f" * 3 + b"\x87\x85R.",
    "a negative shape": b"\x80\x02ctorch\nSize\nJ\xff\xff\xff\xff\x85\x85R.",
    "deep lists": b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".",
    "deep tuples in a set": b"\x80\x02cbuiltins\nset\n]" + _NESTED_TUPLES + b"a\x85R.",
    "a list in itself": b"\x80\x02]q\x00h\x00a.",
    "a list as a key": b"\x80\x02}]Ns.",
    "references that multiply": (
        b"\x80\x02(]q\x00"
        + b"".join(b"]q%c(%se" % (i, b"h%c" % (i - 1) * 10) for i in range(1, 30))
        + b"t."
    ),
    "nothing": b"",
    "no end": b"\x80\x02N",
    "a mark as the value": b"\x80\x02(.",
    "half a surrogate": b"\x80\x02X\x03\x00\x00\x00\xed\xa0\x80.",
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_pickle_is_refused_at_once_and_changes_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    attributes = dict(vars(torch.FloatStorage)), dict(vars(argparse.Namespace))
    with pytest.raises(CheckpointError, match="was refused"):
        inspect(save_pickle(tmp_path / "x.pt", HOSTILE[name]))
    assert os.listdir(tmp_path) == ["x.pt"]
    assert attributes == (dict(vars(torch.FloatStorage)), dict(vars(argparse.Namespace)))


def test_a_pickle_cannot_change_the_storage_that_it_refers_to(tmp_path: Path) -> None:
    storage = ("storage", torch.FloatStorage, "data.pkl", "cpu", 2)
    reference = b"cbuiltins\ntuple\n" + pickle.dumps([*storage], 2)[2:-1] + b"\x85R"
    items = b"}X\x04\x00\x00\x00pathK\x01s"
    for attributes in (items, b"N" + items + b"\x86"):
        path = save_pickle(tmp_path / "x.pt", b"\x80\x02" + reference + b"Q" + attributes + b"b.")
        with pytest.raises(CheckpointError, match="was refused"):
            inspect(path)


def test_what_a_hostile_pickle_asks_for_is_named_and_not_even_imported(tmp_path: Path) -> None:
    for data, name in (
        (HOSTILE["references that multiply"], "by references"),
        (HOSTILE["posix.system"], r"posix\.system"),
        (b"\x80\x02cantigravity\nfly\n)R.", "antigravity"),
    ):
        with pytest.raises(CheckpointError, match=name):
            inspect(save_pickle(tmp_path / "x.pt", data))
    assert "antigravity" not in sys.modules


# -- bounds of time and memory


def assert_small(call: Callable[[], object], says: str = "", seconds: float = 5) -> None:
    """Assert that a call costs little: it returns, or raises CheckpointError if ``says``."""

    def checked() -> None:
        with pytest.raises(CheckpointError, match=says) if says else contextlib.nullcontext():
            call()

    used = bounded(checked)
    assert (used.error, used.nbytes < 256 << 20) == ("", True), used
    assert used.seconds < seconds, used


def opened(path: Path) -> None:
    with contextlib.suppress(CheckpointError):
        inspect(path)


_LONG_LIST = b"](" + b"K\x01" * 100_000 + b"eq\x000"
_LONG_TEXT = b"X" + struct.pack("<I", 1_000_000) + b"a" * 1_000_000 + b"q\x000"
_LONG_BYTES = b"B" + struct.pack("<I", 1 << 20) + bytes(1 << 20) + b"q\x000"
_ARRAY_OF_LONG_BYTES = (
    b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85C\x01b\x87R"
    b"(K\x01J\x00\x00\x10\x00\x85cnumpy\ndtype\nX\x02\x00\x00\x00u1\x85R\x89h\x00tb"
)
_KEYS_OF_LONG_TEXTS = b"".join(b"(" + b"h\x00" * 60 + b"K%ctN" % at for at in range(250))
_HUGE_NUMBER = b"\x8a\xff" + b"\x7f" * 255 + b"q\x00"
COSTLY = {
    "pairs of an ordered dict that are one list": (
        b"\x80\x02" + _LONG_LIST + b"ccollections\nOrderedDict\n"
        b"](" + b"h\x00" * 100_000 + b"e\x85R."
    ),
    "keys of one text many times": b"\x80\x02" + _LONG_TEXT + b"}(" + _KEYS_OF_LONG_TEXTS + b"u.",
    "arrays of one content": (
        b"\x80\x03" + _LONG_BYTES + b"](" + _ARRAY_OF_LONG_BYTES * 3000 + b"e."
    ),
    "a size of huge numbers": (
        b"\x80\x02ctorch\nSize\n(" + _HUGE_NUMBER + b"h\x00" * 200_000 + b"t\x85R."
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", COSTLY)
def test_what_a_pickle_refers_to_often_is_neither_copied_nor_multiplied(
    name: str, tmp_path: Path
) -> None:
    path = save_pickle(tmp_path / "x.pt", COSTLY[name])
    assert_small(lambda: opened(path))


def test_values_that_are_not_tensors_are_bounded(tmp_path: Path) -> None:
    path = save_pickle(tmp_path / "x.pt", pickle.dumps(bytes(100_000_000)))
    assert_small(lambda: inspect(path), "the limit is 100000000")


# -- DTensors


def strided(*splits: int, rank: int = 0, mesh: int = 2) -> DTensor:
    """A rank's part of a tensor whose dims are each cut over a dim of a mesh."""
    local = torch.empty(()).expand((8192 // mesh,) * len(splits))
    cuts = [_StridedShard(dim, split_factor=number) for dim, number in enumerate(splits)]
    return d_tensor(local, (8192,) * len(splits), (mesh,) * len(splits), rank, cuts)


@pytest.mark.parametrize("splits", [(4096, 4096), (256, 256, 4), (1 << 30,)])
def test_splits_of_several_dims_are_refused_before_they_are_multiplied(
    splits: tuple[int, ...], tmp_path: Path
) -> None:
    torch.save({"w": strided(*splits)}, tmp_path / "x.pt")
    assert_small(lambda: inspect(tmp_path / "x.pt"), "splits|parts")


def test_many_tensors_with_splits_take_little_time_and_memory_each(tmp_path: Path) -> None:
    """As tensor parallelism inside FSDP has them, and the most that are not refused."""
    for num, split in ((100, 16), (30, 128)):
        path = tmp_path / f"{split}"
        path.mkdir()
        for rank in range(2):
            one = strided(split, rank=rank)
            parts = (DTensor(one.to_local(), one._spec, requires_grad=False) for _ in range(num))
            torch.save({f"{n}": part for n, part in enumerate(parts)}, path / f"rank_{rank}.pt")
        assert_small(lambda path=path: inspect(path), seconds=1)  # of ten times as many: 5
        assert len(inspect(path).tensors[0].parts) == 2 * split


@pytest.mark.parametrize("number", [2, ()], ids=["numbers", "empty"])
def test_nested_sizes_of_a_mesh_are_refused_before_they_are_followed(
    number: Any, tmp_path: Path
) -> None:
    nested: Any = number
    for _ in range(7):
        nested = (nested,) * 60
    for sizes in ((nested,), (2,) * 65):
        tensor = d_tensor(torch.ones(3, 2), (6, 2), (2,), 0, [Shard(0)])
        layout: Any = tensor.device_mesh._layout
        for name in vars(layout):
            object.__setattr__(layout, name, sizes)
        torch.save({"w": tensor}, tmp_path / "x.pt")
        assert_small(lambda: inspect(tmp_path / "x.pt"), "was refused|do not belong")
