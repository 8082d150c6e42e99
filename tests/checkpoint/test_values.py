"""Values as JSON: what goes in comes out as it was, what is no data is refused, and no text that is
read runs any code."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import json
import math
import random
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from fsdp_compat.checkpoint._texts import parse_json
from fsdp_compat.checkpoint._values import decode, encode
from fsdp_compat.errors import CheckpointError, UsageError
from tests.support.checkpoints import refused

HERE = __name__


class Colour(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


class Letter(str, enum.Enum):
    A = "a"


class Point(NamedTuple):
    x: Any
    y: Any = 0


@dataclasses.dataclass
class Progress:
    epoch: int
    best: Any = None


ran: list[str] = []  # methods of the class below


def _noise(name: str) -> Callable[..., Any]:
    return lambda *_: ran.append(name)


NOISES = ("init", "del", "setattr", "setstate", "reduce", "deepcopy", "hash", "eq", "iter", "bool")
Noisy: Any = type("Noisy", (), {f"__{name}__": _noise(name) for name in NOISES})


Kept = dict[str, Tensor]


def encoded(value: object) -> tuple[Any, Kept]:
    kept: Kept = {}

    def put(tensor: Tensor) -> str:
        assert not tensor.requires_grad
        kept[f"t{len(kept)}"] = tensor
        return f"t{len(kept) - 1}"

    return encode(value, "extra", put), kept


def getting(kept: Kept) -> Callable[[str, torch.dtype, tuple[int, ...]], Tensor]:
    """Return what gives the tensors that were kept, or their bytes."""
    return lambda name, dtype, shape: kept[name].view(-1).view(dtype).view(shape)


def through_text(value: object) -> Any:
    """Encode, go through a text as files do, and decode."""
    content, kept = encoded(value)
    return decode(json.loads(json.dumps(content)), "extra", getting(kept))


def as_text(value: Any) -> str:
    """What a value is, whatever the order of sets."""
    if isinstance(value, set | frozenset | tuple):
        inside = map(as_text, value)
        inside = inside if isinstance(value, tuple) else sorted(inside)
        return f"{type(value).__name__}({', '.join(inside)})"
    return repr(value)


def assert_same(actual: Any, expected: Any) -> None:
    """Equal in type, order, sign of zero, and NaN is NaN."""
    assert type(actual) is type(expected), (actual, expected)
    if isinstance(expected, float):
        same = actual == expected and math.copysign(1, actual) == math.copysign(1, expected)
        assert same or (math.isnan(actual) and math.isnan(expected)), (actual, expected)
    elif isinstance(expected, complex):
        assert_same([actual.real, actual.imag], [expected.real, expected.imag])
    elif isinstance(expected, Tensor):
        assert actual.dtype == expected.dtype
        torch.testing.assert_close(actual, expected.detach(), rtol=0, atol=0, equal_nan=True)
    elif isinstance(expected, np.ndarray):
        assert actual.dtype == expected.dtype
        np.testing.assert_array_equal(actual, expected)
    elif isinstance(expected, dict):
        assert_same(list(actual.items()), list(expected.items()))
    elif isinstance(expected, set | frozenset):
        assert as_text(actual) == as_text(expected)
    elif isinstance(expected, list | tuple | collections.deque):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            assert_same(one, other)
    else:
        assert actual == expected


# -- what is data


numbers = st.integers() | st.integers(-(2**200), 2**200) | st.floats() | st.booleans()
keys = st.recursive(
    st.none() | numbers | st.text() | st.text().map("@{}".format) | st.binary(),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=5,
)
atoms = [
    torch.float32,
    torch.bfloat16,
    torch.complex64,
    torch.device("cpu"),
    torch.device("cuda:1"),
]
arrays = [
    np.array([1.5, np.nan, -0.0]),
    np.array(7, np.uint8),
    np.zeros((0, 3), np.float16),
    np.array([[True], [False]]),
    np.array([1 + 2j], np.complex64),
    np.arange(6, dtype=np.int64).reshape(2, 3).T,
    np.arange(5)[::-1],
    np.arange(5)[::2],
    np.array([1, 2], np.uint32),
]
leaves = st.one_of(
    keys,
    st.complex_numbers(),
    st.sampled_from(atoms),
    st.binary().map(bytearray),
    st.lists(st.integers(0, 5)).map(torch.Size),
    st.lists(st.floats(width=32), max_size=3).map(torch.tensor),
    st.lists(st.integers(-99, 99), max_size=3).map(lambda items: np.array(items, np.int16)),
)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        *(st.lists(inner, max_size=4).map(kind) for kind in (list, tuple, collections.deque)),
        st.dictionaries(st.text(), inner, max_size=4),
        *(st.dictionaries(keys, inner, max_size=4).map(k) for k in (dict, collections.OrderedDict)),
        st.dictionaries(st.text(), st.integers(), max_size=4).map(collections.Counter),
        st.sets(keys, max_size=4),
    ),
    max_leaves=20,
)


@example(value=arrays)
@given(value=values)
def test_every_value_comes_back_with_its_type_and_its_order(value: object) -> None:
    assert_same(through_text(value), value)


@pytest.mark.parametrize(
    "value",
    [
        {"@tensor": "t0"},
        {"@object": ["os:system", {}]},
        {"@": 1},
        {"": {"@set": [1]}},
        {True: "bool", 2: "int", 2.5: "float", None: "none", (1, ("a", b"c")): "", "@x": 1, "x": 2},
        [{}, [], (), "", set(), frozenset(), collections.deque()],
        collections.deque([1, (2,)], maxlen=3),
        collections.Counter({"a": 2, "b": -1, ("c", 1): 0}),
        collections.OrderedDict([("b", 1), ("a", 2)]),
        10**300,
        "\ud800 and \x00 and é",
        [[[[[[[[[[[[{"a": ((((1,),),),)}]]]]]]]]]]]],
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_that_could_be_taken_for_something_else_comes_back(value: object) -> None:
    decoded = through_text(value)
    assert_same(decoded, value)
    assert getattr(decoded, "maxlen", None) == getattr(value, "maxlen", None)


def test_values_of_some_classes_come_back_as_the_plain_value() -> None:
    """What torch.max returns is a named tuple, too."""
    shared = [1]
    point = {"point": Point(1, [2]), "deeper": [Point(Point(3))]}
    assert_same(through_text(point), {"point": (1, [2]), "deeper": [((3, 0), 0)]})
    assert_same(through_text(torch.ones(2).max(0)), (torch.tensor(1.0), torch.tensor(0)))
    assert_same(through_text(torch.__version__), str(torch.__version__))
    assert_same(through_text(collections.defaultdict(list, {1: [2]})), {1: [2]})
    assert through_text([shared, {"a": shared}]) == [[1], {"a": [1]}]  # twice is not a cycle
    numbers = [np.float32(0.5), np.float64(np.inf), np.int8(-3), np.bool_(True), np.complex64(1j)]
    assert_same(through_text([*numbers, np.str_("a")]), [0.5, math.inf, -3, True, 1j, "a"])


@pytest.mark.parametrize("around", [lambda inner: (inner,), lambda inner: {1: inner}])
def test_a_value_of_the_largest_allowed_depth_is_read(around: Callable[[Any], Any]) -> None:
    value: Any = 0
    for _ in range(65):
        value = around(value)
    content, _ = encoded(value)
    text = json.dumps({"a": {"b": [content]}}).encode()
    assert_same(decode(parse_json(text)["a"]["b"][0], "extra", getting({})), value)


@pytest.mark.filterwarnings("error")
def test_an_array_that_cannot_be_written_to_comes_back_without_a_warning() -> None:
    decoded = through_text(np.broadcast_to(np.array([1, 2]), (3, 2)))
    assert decoded.tolist() == [[1, 2]] * 3


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(1.5),
        torch.empty(0, 3),
        torch.tensor([1, -1], dtype=torch.int8),
        torch.tensor([True, False]),
        torch.tensor([0.1, math.nan, math.inf], dtype=torch.bfloat16),
        torch.arange(6).reshape(2, 3),
        torch.tensor([1 + 2j], dtype=torch.complex128),
        torch.ones(3).to(torch.float8_e8m0fnu).view(torch.float8_e4m3fnuz),
        nn.Parameter(torch.ones(2)),
    ],
    ids=lambda tensor: f"{tensor.dtype}-{tuple(tensor.shape)}",
)
def test_a_tensor_is_stored_separately_and_comes_back(tensor: Tensor) -> None:
    content, kept = encoded(tensor)
    name, value = kept.popitem()
    assert not kept
    assert (type(value), value.requires_grad) == (Tensor, False)
    assert_same(value, tensor.detach())
    # as a file has it whose format does not know the dtype
    as_bytes = value.contiguous().view(-1).view(torch.uint8)
    for found in (value, as_bytes):
        decoded = decode(json.loads(json.dumps(content)), "extra", getting({name: found}))
        assert_same(decoded, tensor.detach())
        # What is filled later is filled in it.
        assert decoded.untyped_storage().data_ptr() == found.untyped_storage().data_ptr()


def test_of_a_tensor_that_is_conjugated_or_negated_when_it_is_read_the_values_are_kept() -> None:
    """Its memory holds others, and memory is what is written."""
    conjugated = torch.tensor([1 + 2j]).conj()
    _, kept = encoded([conjugated, conjugated.imag])
    assert [(tensor.is_conj(), tensor.is_neg()) for tensor in kept.values()] == [(False, False)] * 2
    assert_same(list(kept.values()), [torch.tensor([1 - 2j]), torch.tensor([-2.0])])


def test_random_states_come_back() -> None:
    python, legacy = random.Random(3), np.random.RandomState(3)
    python.gauss(0, 1), legacy.standard_normal()  # these keep the next one
    states = [python.getstate(), legacy.get_state(), np.random.default_rng(3).bit_generator.state]
    assert_same(through_text([*states, torch.get_rng_state()]), [*states, torch.get_rng_state()])


# -- what is refused


def no_data() -> dict[str, Any]:
    cycle: list[Any] = [1]
    cycle.append({"again": cycle})
    linear = nn.Linear(1, 1)
    freed = torch.ones(1000)
    freed.untyped_storage().resize_(0)
    with FakeTensorMode():
        fake = torch.ones(3)
    with warnings.catch_warnings():  # these are going, or on their way
        warnings.simplefilter("ignore")
        quantized = torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8)
        nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])
    return {
        "function": test_random_states_come_back,
        "module": linear,
        "generator": (i for i in range(3)),
        "cycle": cycle,
        "depth": functools.reduce(lambda inner, _: [inner], range(5000), 0),
        "66 levels": functools.reduce(lambda inner, _: (inner,), range(66), 0),
        "object": Noisy(),
        "dataclass": Progress(3),
        "enum": Colour.RED,
        "number that is an enum": Level.LOW,
        "text that is an enum": Letter.A,
        "text of another class": type("Text", (str,), {})("a"),
        "dict of another class": type("Own", (dict,), {})(),
        "array of objects": np.array([object()]),
        "array of texts": np.array(["a"]),
        "masked array": np.ma.masked_array([1, 2], [True, False]),
        "structured array": np.zeros(2, [("a", "i4")]),
        "long double": np.longdouble(1),
        "moment": np.datetime64(5, "ns"),
        "duration": np.timedelta64(5, "ns"),
        "meta tensor": torch.empty(2, device="meta"),
        "sparse tensor": torch.eye(2).to_sparse(),
        "quantized tensor": quantized,
        "nested tensor": nested,
        "freed tensor": freed,
        "fake tensor": fake,
        "tensor of tensors": TwoTensor(torch.arange(3.0), torch.ones(3)),
    }


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("name", no_data())
def test_objects_that_are_not_data_are_refused_with_their_place(name: str) -> None:
    place = "extra" if name in ("depth", "66 levels") else "extra['a'][1]"
    with refused(UsageError, "A value cannot be saved", f"where:    {place}"):
        encoded({"a": [0, no_data()[name]]})


def test_an_object_is_refused_in_any_place_without_running_code_of_its_class() -> None:
    value = Noisy()
    deque = collections.deque([value])
    for content in (value, [value], (value,), {"a": value}, {1: value}, Point(value), deque):
        ran.clear()
        with pytest.raises(UsageError, match=r"got: +a tests.checkpoint.test_values.Noisy"):
            encoded(content)
        assert not ran
    for content in ({print: 1}, {(1, print): 2}, [{1, print}]):
        what = r"got: +a builtins.(builtin_function_or_method|tuple)"
        with pytest.raises(UsageError, match=what):
            encoded(content)


# -- what is read

KEYS = [[], {"a": 1}, {"@object": [f"{HERE}:Noisy", {}]}, {"@tuple": [1, {"@enum": []}]}]
PAIRS = [3, None, [1], [[1]], [[1, 2, 3]], "ab", *([[key, 1], [key, 2]] for key in KEYS)]
TENSORS = [3, None, [], {}, "a", ["a"], ["a", "float32", [1]], ["a", "nn", [1]]]
OBJECTS = [
    *(None, 1, "", [], {}, [[]]),
    *([name, {}] for name in ("os:system", "builtins:eval", "torch.nn:Linear", "os:", "", 3)),
    *([f"{HERE}:Noisy", content] for content in ({}, {"loud": 1}, [], "ONE", None)),
    *([f"importing:{name}", {}, None, [], []] for name in ("Anything", "deeper.Anything")),
]
CLASSES = "object enum flag named_tuple tensor_of call reduce"  # tags that are not known
# Invalid contents of each tag.
INVALID: dict[str, list[Any]] = {
    "@dtype": ["load", "nn", "Tensor", "", "float32.is_complex", 3, None, [], {}],
    "@device": ["nonsense", "", 3.5, None, [], {}, "cpu:-4"],
    "@bytes": ["a", "é", 3, None, [], {}],
    "@bytearray": ["a", "é", 3, None, [], {}],
    "@int": [None, 3, "", "x", [], {}],
    "@complex": [None, 3, [1, 2, 3], ["a", "b"], {}, [None]],
    "@size": [["a"], 3, [[1]], [None], [1.5]],
    "@tuple": [3, None, True, [{"@object": ["os:system", {}]}]],
    "@deque": [3, None, True, [[1], -1], [[1], "a"], [1, None], [[1]]],
    **{tag: [3, None, True, *([key, key] for key in KEYS)] for tag in ("@set", "@frozenset")},
    **{tag: PAIRS for tag in ("@dict", "@ordered", "@counter")},
    **{tag: TENSORS for tag in ("@tensor", "@array")},
    **{f"@{name}": OBJECTS for name in ("", *CLASSES.split())},
}


@pytest.mark.parametrize("tag", INVALID)
def test_an_invalid_text_is_a_checkpoint_error_and_runs_and_imports_nothing(
    tag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module may import others when an attribute of it is asked for; torch does."""
    module = types.ModuleType("importing")
    module.__getattr__ = lambda name: pytest.fail(f"asked for {name}")  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "importing", module)
    before = set(sys.modules)
    ran.clear()
    found = {repr(content): outcome([{"around": {tag: content}}]) for content in INVALID[tag]}
    assert {*found.values()} == {"CheckpointError"}, found
    assert not ran
    assert set(sys.modules) == before


def outcome(content: object) -> str:
    """The name of the error when ``content`` is read, or what was read."""

    def get(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        raise CheckpointError(f"no tensor {name}")  # as of a file without such an entry

    try:
        return f"read as {decode(content, 'extra', get)!r}"
    except Exception as error:
        return type(error).__name__


json_leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
json_values = st.recursive(
    json_leaves | st.sampled_from([f"{HERE}:Point", f"{HERE}:Colour", "RED"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.tuples(st.sampled_from(list(INVALID)), inner).map(lambda pair: dict([pair]))
    ),
    max_leaves=12,
)


@given(content=json_values)
def test_any_text_is_a_value_or_a_checkpoint_error(content: object) -> None:
    found = outcome(content)
    assert found == "CheckpointError" or found.startswith("read as ")


@pytest.mark.parametrize("tag", ["@dict", "@ordered", "@counter", "@set", "@frozenset"])
def test_a_tensor_is_no_key(tag: str) -> None:
    tensor = {"@tensor": ["a", "float32", [1]]}
    content = [tensor] if "set" in tag else [[tensor, 1]]
    with pytest.raises(CheckpointError, match="a Tensor cannot be a key"):
        decode({tag: content}, "extra", lambda *_: torch.ones(1))


def test_a_value_of_an_earlier_version_is_named_with_what_to_do() -> None:
    deep = functools.reduce(lambda inner, _: {"@tuple": [inner]}, range(5000), {"a": 1})
    assert outcome(deep) == "CheckpointError"
    told = "'@object', which this version", "load an older checkpoint, or use", "extra['a']"
    with refused(CheckpointError, *told):
        decode({"a": {"@object": ["elsewhere:Thing", {}]}}, "extra", getting({}))
