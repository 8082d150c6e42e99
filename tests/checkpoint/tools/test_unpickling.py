"""Pickles are read as data: plain values come back as they were, and nothing else happens,
whatever the bytes are."""

from __future__ import annotations

import argparse
import collections
import contextlib
import datetime
import io
import os
import pathlib
import pickle
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_compat.checkpoint._tools.archive import Checksum
from fsdp_compat.checkpoint._tools.reader import Files, read
from fsdp_compat.checkpoint._tools.torch_save import _Storage, unpickle
from fsdp_compat.errors import CheckpointError
from tests.support.sampling import at_most

WHERE = Path("values.pkl")

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
    assert unpickle(pickle.dumps(value, protocol), WHERE) == value


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
        (torch.strided, "torch.strided"),
        (np.float32(1.5), 1.5),
        (np.int64(-3), -3),
        (np.bool_(True), True),
        (bytearray(b"ab"), bytearray(b"ab")),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_of_known_classes_become_plain_ones(
    value: Any, expected: Any, protocol: int
) -> None:
    assert unpickle(pickle.dumps(value, protocol), WHERE) == expected


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["f8", "u4", "i1", "?", "c8"])
def test_arrays_of_numbers_become_tensors(protocol: int, order: Any, dtype: str) -> None:
    array = np.arange(6).reshape(2, 3).astype(dtype, order=order)
    (found,) = unpickle(pickle.dumps([array], protocol), WHERE)
    with Files() as files:
        assert torch.equal(read(found, files), torch.from_numpy(np.ascontiguousarray(array)))


@pytest.mark.parametrize("array", [np.array([{}, None], dtype=object), np.arange(3, dtype=">i4")])
def test_arrays_of_objects_and_of_other_byte_orders_are_refused(array: Any) -> None:
    with pytest.raises(CheckpointError, match="only arrays of numbers"):
        unpickle(pickle.dumps(array), WHERE)


# -- hostile pickles


def _call(name: str, args: bytes) -> bytes:
    return b"\x80\x02c" + name.replace(" ", "\n").encode() + b"\n" + args + b"\x85R."


_TOUCH = b"X\x10\x00\x00\x00touch was_called"
_NESTED_TUPLES = b")" + b"\x85" * 200_000

HOSTILE = {
    "os.system": _call("os system", _TOUCH),
    "posix.system": _call("posix system", _TOUCH),
    "eval": _call("builtins eval", b"X\x01\x00\x00\x001"),
    "exec of Python 2": _call("__builtin__ exec", b"X\x01\x00\x00\x001"),
    "import": _call("builtins __import__", b"X\x02\x00\x00\x00os"),
    "a dotted name": _call("torch os.system", _TOUCH),
    "a name inside a known class": _call("collections OrderedDict.__init__", b"]"),
    "a lazily loaded module": _call("torch _dynamo", b"]"),
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
    "a storage class": b"\x80\x02ctorch\nFloatStorage\n.",
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
    "deep tuples": b"\x80\x02" + _NESTED_TUPLES + b".",
    "deep tuples in a set": b"\x80\x02cbuiltins\nset\n]" + _NESTED_TUPLES + b"a\x85R.",
    "a list in itself": b"\x80\x02]q\x00h\x00a.",
    "a dict in itself": b"\x80\x02}q\x00X\x01\x00\x00\x00ah\x00s.",
    "a list as a key": b"\x80\x02}]Ns.",
    "references that multiply": (
        b"\x80\x02(]q\x00"
        + b"".join(b"]q%c(%se" % (i, b"h%c" % (i - 1) * 10) for i in range(1, 30))
        + b"t."
    ),
    "nothing": b"",
    "no end": b"\x80\x02N",
    "a mark as the value": b"\x80\x02(.",
    "a mark in a tuple": b"\x80\x02(\x85.",
    "no mark": b"\x80\x02NNt.",
    "an empty stack": b"\x80\x020.",
    "protocol 99": b"\x80\x63N.",
    "half a surrogate": b"\x80\x02X\x03\x00\x00\x00\xed\xa0\x80.",
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_pickle_is_refused_at_once_and_changes_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    attributes = dict(vars(torch.FloatStorage)), dict(vars(argparse.Namespace))
    with pytest.raises(CheckpointError, match="was refused"):
        unpickle(HOSTILE[name], WHERE)
    assert not os.listdir(tmp_path)
    assert attributes == (dict(vars(torch.FloatStorage)), dict(vars(argparse.Namespace)))


def test_a_pickle_cannot_change_the_storage_that_it_refers_to() -> None:
    storage = _Storage(WHERE, Checksum(0, 8, 0), torch.float32)
    items = b"}X\x04\x00\x00\x00pathK\x01s"
    for attributes in (items, b"N" + items + b"\x86"):
        with pytest.raises(CheckpointError, match="was refused"):
            unpickle(b"\x80\x02K\x01Q" + attributes + b"b.", WHERE, lambda reference: storage)
        assert storage.path is WHERE


def test_what_a_hostile_pickle_asks_for_is_named_and_not_even_imported() -> None:
    for data, name in (
        (HOSTILE["references that multiply"], "by references"),
        (HOSTILE["posix.system"], r"posix\.system"),
        (b"\x80\x02cantigravity\nfly\n)R.", "antigravity"),
    ):
        with pytest.raises(CheckpointError, match=name):
            unpickle(data, WHERE)
    assert "antigravity" not in sys.modules


_SAMPLE = {
    "a": [1, 2.5, (3, None)],
    "b": {"x": np.arange(3), "y": collections.OrderedDict(z={1, 2})},
    "c": argparse.Namespace(d=torch.float32, e=torch.Size([1])),
}
_SAMPLES = [pickle.dumps(_SAMPLE, protocol) for protocol in (2, 4, 5)]


@given(
    st.sampled_from(_SAMPLES),
    st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=4),
    st.integers(0, 10_000),
)
@settings(max_examples=at_most(150, of_all=600), deadline=None)
def test_changed_and_cut_pickles_give_an_error_or_values(
    data: bytes, changes: list[tuple[int, int]], length: int
) -> None:
    changed = bytearray(data)
    for place, byte in changes:
        changed[place % len(changed)] = byte
    with contextlib.suppress(CheckpointError):
        unpickle(bytes(changed[: length % (2 * len(changed)) + 1]), WHERE)


def test_a_text_longer_than_the_limit_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    import fsdp_compat.checkpoint._tools.pickles as pickles

    monkeypatch.setattr(pickles, "MAX_TEXT_NBYTES", 100)
    with pytest.raises(CheckpointError, match="100 bytes"):
        unpickle(io.BytesIO(pickle.dumps("a" * 200)), WHERE)
