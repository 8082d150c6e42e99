"""Values as JSON: what goes in comes out as it was, what is no data is refused, and no text that is
read runs any code."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import enum
import fractions
import functools
import json
import math
import random
import sys
import threading
import types
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import lr_scheduler as schedules
from torch.testing._internal.two_tensor import TwoTensor

from fsdp_compat.checkpoint._texts import parse_json
from fsdp_compat.checkpoint._values import decode, encode
from fsdp_compat.errors import CheckpointError, UsageError

HERE = __name__


class Colour(enum.Enum):
    RED = 1
    BLUE = "b"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Letter(str, enum.Enum):
    A = "a"


class Bits(enum.Flag):
    ONE = 1
    TWO = 2


class Point(NamedTuple):
    x: Any
    y: Any = 0


@dataclasses.dataclass
class Progress:
    epoch: int
    best: Any = None


ran: list[str] = []  # what code of the class below ran


class Noisy:
    """Tells of everything that runs when an object is made, filled, copied or thrown away."""

    def __new__(cls, *_: object) -> Noisy:
        ran.append("__new__")
        return super().__new__(cls)

    def __init__(self, *_: object) -> None:
        ran.append("__init__")

    def __del__(self) -> None:
        ran.append("__del__")

    def __setattr__(self, name: str, value: object) -> None:
        ran.append("__setattr__")

    def __setstate__(self, state: object) -> None:
        ran.append("__setstate__")

    def __reduce__(self) -> Any:
        ran.append("__reduce__")
        return Noisy, ()

    def __deepcopy__(self, memo: object) -> Noisy:
        ran.append("__deepcopy__")
        return self

    def __hash__(self) -> int:
        ran.append("__hash__")
        return 1

    def __eq__(self, other: object) -> bool:
        ran.append("__eq__")
        return self is other


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
leaves = (
    keys
    | st.complex_numbers()
    | st.sampled_from(
        [
            torch.float32,
            torch.bfloat16,
            torch.int64,
            torch.complex64,
            torch.device("cpu"),
            torch.device("cuda", 1),
        ]
    )
    | st.lists(st.integers(0, 5)).map(torch.Size)
    | st.lists(st.floats(width=32), max_size=3).map(torch.tensor)
    | st.lists(st.integers(-99, 99), max_size=3).map(lambda items: np.array(items, np.int16))
)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.lists(inner, max_size=4).map(collections.deque),
        st.dictionaries(st.text(), inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4).map(collections.OrderedDict),
        st.dictionaries(st.text(), st.integers(), max_size=4).map(collections.Counter),
        st.sets(keys, max_size=4),
    ),
    max_leaves=20,
)


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
        {
            True: "bool",
            2: "int",
            2.5: "float",
            None: "none",
            (1, ("a", b"c")): "tuple",
            "@x": 1,
            "x": 2,
        },
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
    if isinstance(value, collections.deque):
        assert decoded.maxlen == value.maxlen


def test_of_a_named_tuple_and_of_the_version_of_torch_the_plain_value_comes_back() -> None:
    """What torch.max returns is one, too."""
    assert_same(
        through_text({"point": Point(1, [2]), "deeper": [Point(Point(3))]}),
        {"point": (1, [2]), "deeper": [((3, 0), 0)]},
    )
    assert_same(through_text(torch.ones(2).max(0)), (torch.tensor(1.0), torch.tensor(0)))
    assert_same(through_text(torch.__version__), str(torch.__version__))


@pytest.mark.parametrize("around", [lambda inner: (inner,), lambda inner: {1: inner}])
def test_a_value_of_the_largest_allowed_depth_is_read(
    around: Callable[[Any], Any],
) -> None:
    value: Any = 0
    for _ in range(65):
        value = around(value)
    content, _ = encoded(value)
    assert_same(
        decode(
            parse_json(json.dumps({"a": {"b": [content]}}).encode())["a"]["b"][0],
            "extra",
            getting({}),
        ),
        value,
    )


def test_a_defaultdict_comes_back_as_a_dict_without_its_factory() -> None:
    assert_same(through_text(collections.defaultdict(list, {1: [2]})), {1: [2]})


def test_a_value_that_occurs_twice_is_not_a_cycle() -> None:
    shared = [1]
    assert through_text([shared, {"a": shared}]) == [[1], {"a": [1]}]


@pytest.mark.parametrize(
    "array",
    [
        np.array([1.5, np.nan, -0.0]),
        np.array(7, np.uint8),
        np.zeros((0, 3), np.float16),
        np.array([[True], [False]]),
        np.array([1 + 2j], np.complex64),
        np.arange(6, dtype=np.int64).reshape(2, 3).T,
        np.arange(5)[::-1],
        np.arange(5)[::2],
        np.array([1, 2], np.uint32),
    ],
    ids=lambda array: f"{array.dtype}-{'x'.join(map(str, array.shape))}",
)
def test_an_array_comes_back(array: np.ndarray) -> None:
    assert_same(through_text(array), array)


def test_an_array_that_cannot_be_written_to_comes_back_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decoded = through_text(np.broadcast_to(np.array([1, 2]), (3, 2)))
    assert decoded.tolist() == [[1, 2]] * 3


def test_a_number_of_numpy_comes_back_as_a_number() -> None:
    given = [
        np.float32(0.5),
        np.float64(np.inf),
        np.int8(-3),
        np.bool_(True),
        np.str_("a"),
        np.complex64(1j),
    ]
    assert_same(through_text(given), [0.5, math.inf, -3, True, "a", 1j])


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
    as_bytes = (
        value.contiguous().view(-1).view(torch.uint8)
    )  # as a file has it whose format does not know the dtype
    for found in (value, as_bytes):
        decoded = decode(json.loads(json.dumps(content)), "extra", getting({name: found}))
        assert_same(decoded, tensor.detach())
        assert decoded.untyped_storage().data_ptr() == found.untyped_storage().data_ptr(), (
            "what is filled later is filled in it"
        )


def test_of_a_tensor_that_is_conjugated_or_negated_when_it_is_read_the_values_are_kept() -> None:
    """Its memory holds others, and memory is what is written."""
    conjugated = torch.tensor([1 + 2j]).conj()
    _, kept = encoded([conjugated, conjugated.imag])
    assert [(tensor.is_conj(), tensor.is_neg()) for tensor in kept.values()] == [(False, False)] * 2
    assert_same(list(kept.values()), [torch.tensor([1 - 2j]), torch.tensor([-2.0])])


def test_random_states_go_on_where_they_were() -> None:
    generators = (
        random.Random(3),
        np.random.RandomState(3),
        np.random.default_rng(3),
        torch.Generator().manual_seed(3),
    )
    python, legacy, numpy, torchs = generators
    draw: list[Callable[[], Any]] = [
        python.random,
        legacy.random_sample,
        numpy.random,
        lambda: torch.rand((), generator=torchs),
    ]
    draw += [lambda: python.gauss(0, 1), legacy.standard_normal]  # these keep the next one
    _ = [one() for one in draw]
    states = through_text(
        [python.getstate(), legacy.get_state(), numpy.bit_generator.state, torchs.get_state()]
    )
    expected = [float(one()) for one in draw]
    python.setstate(states[0])
    legacy.set_state(states[1])
    numpy.bit_generator.state = states[2]
    torchs.set_state(states[3])
    assert [float(one()) for one in draw] == expected


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": lambda its: schedules.StepLR(its, 2),
    "multi_step": lambda its: schedules.MultiStepLR(its, [2, 2, 4]),
    "one_cycle": lambda its: schedules.OneCycleLR(its, 0.1, 20),
    "plateau": lambda its: schedules.ReduceLROnPlateau(its, patience=1),
    "cosine": lambda its: schedules.CosineAnnealingWarmRestarts(its, 3),
    "cyclic": lambda its: schedules.CyclicLR(its, 0.01, 0.1, 3),
    "lambda": lambda its: schedules.LambdaLR(its, lambda epoch: 0.9**epoch),
    "sequential": lambda its: schedules.SequentialLR(
        its, [schedules.LinearLR(its), schedules.MultiStepLR(its, [2])], [2]
    ),
    "chained": lambda its: schedules.ChainedScheduler(
        [schedules.LinearLR(its), schedules.ExponentialLR(its, 0.9)]
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_continues_from_its_saved_position(name: str) -> None:
    def made() -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
        return optimizer, SCHEDULES[name](optimizer)

    def step(optimizer: torch.optim.Optimizer, schedule: Any) -> float:
        optimizer.step()
        schedule.step(*([1.0] if name == "plateau" else []))
        return optimizer.param_groups[0]["lr"]

    optimizer, schedule = made()
    for _ in range(3):
        step(optimizer, schedule)
    saved = through_text([schedule.state_dict(), optimizer.state_dict()])
    assert_same(saved[0], schedule.state_dict())
    other_optimizer, other = made()
    other.load_state_dict(saved[0])
    other_optimizer.load_state_dict(saved[1])
    assert [step(other_optimizer, other) for _ in range(4)] == [
        step(optimizer, schedule) for _ in range(4)
    ]


# -- what is refused


def refused() -> dict[str, Any]:
    class Local:
        pass

    cycle: list[Any] = [1]
    cycle.append({"again": cycle})
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
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
        "function": test_random_states_go_on_where_they_were,
        "lambda": lambda: 0,
        "builtin": print,
        "class": Progress,
        "python module": math,
        "module": linear,
        "optimizer": torch.optim.SGD(linear.parameters(), lr=0.1),
        "schedule": schedules.StepLR(torch.optim.SGD(linear.parameters(), lr=0.1), 1),
        "generator": (i for i in range(3)),
        "torch generator": torch.Generator(),
        "numpy generator": np.random.default_rng(0),
        "iterator": iter([1]),
        "lock": threading.Lock(),
        "cycle": cycle,
        "depth": deep,
        "66 levels": functools.reduce(lambda inner, _: (inner,), range(66), 0),
        "object of a class": Local(),
        "noisy object": Noisy(),
        "namespace": argparse.Namespace(lr=0.1),
        "dataclass": Progress(3),
        "enum": Colour.RED,
        "number that is an enum": Level.LOW,
        "text that is an enum": Letter.A,
        "flag": Bits.ONE,
        "text of another class": type("Text", (str,), {})("a"),
        "number of another class": type("Number", (int,), {})(3),
        "fraction": fractions.Fraction(1, 3),
        "tensor of tensors": TwoTensor(torch.arange(3.0), torch.ones(3)),
        "object": object(),
        "range": range(3),
        "array of objects": np.array([object()]),
        "array of texts": np.array(["a"]),
        "long double": np.longdouble(1),
        "ufunc": np.add,
        "meta tensor": torch.empty(2, device="meta"),
        "sparse tensor": torch.eye(2).to_sparse(),
        "quantized tensor": quantized,
        "nested tensor": nested,
        "freed tensor": freed,
        "fake tensor": fake,
        "masked array": np.ma.masked_array([1, 2], [True, False]),
        "structured array": np.zeros(2, [("a", "i4")]),
        "moment": np.datetime64(5, "ns"),
        "while": np.timedelta64(5, "ns"),
        "dict of a dict's class": type("Own", (dict,), {})(),
    }


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("name", refused())
def test_objects_that_are_not_data_are_refused_with_their_place(name: str) -> None:
    with pytest.raises(UsageError, match="A value cannot be saved") as caught:
        encoded({"a": [0, refused()[name]]})
    lines = str(caught.value).splitlines()
    assert [line.strip().partition(":")[0] for line in lines[1:]] == [
        "expected",
        "got",
        "where",
        "to do",
    ]
    assert (
        lines[3]
        .strip()
        .startswith(
            "where:    extra" if name in ("depth", "66 levels") else "where:    extra['a'][1]"
        )
    )


def test_objects_that_are_not_data_are_refused_inside_keys_and_tuples() -> None:
    for value in (
        {print: 1},
        Point(print),
        {1: print},
        collections.deque([print]),
        {(1, print): 2},
        [{1, print}],
    ):
        with pytest.raises(
            UsageError, match=r"got: +a builtins.(builtin_function_or_method|tuple)"
        ):
            encoded(value)


def test_an_object_is_refused_without_running_code_of_its_class() -> None:
    value = Noisy()
    for content in (value, [value], (value,), {"a": value}, collections.deque([value])):
        ran.clear()
        with pytest.raises(UsageError, match=r"got: +a tests.checkpoint.test_values.Noisy"):
            encoded(content)
        assert not ran


# -- what is read

OBJECTS = (
    "@object",
    "@enum",
    "@flag",
    "@named_tuple",
    "@tensor_of",
)  # as an earlier version has written them


@pytest.mark.parametrize("tag", OBJECTS)
@pytest.mark.parametrize(
    "attributes", [{}, {"loud": 1}, {"__class__": 1}, [], "ONE", None, 3], ids=repr
)
def test_no_object_of_a_class_that_a_text_names_is_made(tag: str, attributes: object) -> None:
    made = {tag: [f"{HERE}:Noisy", attributes]}
    contents: list[Any] = [made]
    for key in (made, {"@tuple": [1, made]}, {"@frozenset": [{"@tuple": [made]}]}):
        contents += [
            {"@dict": [[key, 1], [key, 2]]},
            {"@set": [key, key]},
            {"@counter": [[key, 1]]},
        ]
    for content in contents:
        ran.clear()
        with pytest.raises(
            CheckpointError,
            match=f"cannot be read(.|\n)*got: +'{tag}', which this version does not know",
        ):
            decode(content, "extra", getting({}))
        assert not ran, content


@pytest.mark.parametrize("tag", OBJECTS)
def test_decoding_imports_no_module(tag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module may import others when an attribute of it is asked for; torch does."""
    module = types.ModuleType("importing")
    module.__getattr__ = lambda name: pytest.fail(f"asked for {name}")  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "importing", module)
    before = set(sys.modules)
    for path in (
        "importing:Anything",
        "importing:deeper.Anything",
        "not_there:A",
        "torch.not_there:A",
    ):
        with pytest.raises(CheckpointError, match="cannot be read"):
            decode({tag: [path, {}, None, [], []]}, "extra", getting({}))
    assert set(sys.modules) == before


def deep_text() -> Any:
    value: Any = {"a": 1}
    for _ in range(5000):
        value = {"@tuple": [value]}
    return value


MALICIOUS: list[Any] = [
    *(
        {"@object": [path, {}]}
        for path in (
            "os:system",
            "builtins:eval",
            "builtins:object",
            "os:",
            ":",
            "",
            "subprocess:Popen",
            3,
            None,
            [],
        )
    ),
    *({"@object": ["torch.nn:Linear", content]} for content in ({}, {"weight": 1})),
    *(
        {tag: ["os:system", "id"]}
        for tag in ("@enum", "@named_tuple", "@tensor_of", "@object", "@call", "@", "@reduce")
    ),
    *(
        {tag: content}
        for tag in ("@object", "@enum", "@named_tuple", "@tensor_of", "@unknown")
        for content in (
            None,
            1,
            "",
            "a",
            [],
            {},
            [[]],
            [f"{HERE}:Progress"],
            [f"{HERE}:Colour"],
            [f"{HERE}:Point"],
            [f"{HERE}:Point", 3],
        )
    ),
    *(
        {"@enum": [f"{HERE}:Colour", member]}
        for member in ("GREEN", "__class__", "mro", None, [], 5)
    ),
    *(
        {"@named_tuple": [f"{HERE}:Point", content]}
        for content in (5, "ab1", [1], [1, 2, 3], {"a": 1})
    ),
    *({"@object": [f"{HERE}:Progress", content]} for content in ([1], "ab", 3, None)),
    {"@object": [f"{HERE}:Progress", {"epoch": {"@object": ["os:system", {}]}}]},
    {"@tensor_of": ["torch:Tensor", {}, None, [], []]},
    {"@tensor_of": ["torch.nn.parameter:Parameter", {}, None, [], []]},
    {
        "@tensor_of": [
            "torch.testing._internal.two_tensor:TwoTensor",
            {"a": 1, "b": 2},
            None,
            [1],
            [1],
        ]
    },
    *(
        {"@dtype": content}
        for content in (
            "load",
            "nn",
            "Tensor",
            "nothing",
            "",
            "float32.is_complex",
            3,
            None,
            [],
            {},
        )
    ),
    *({"@device": content} for content in ("nonsense", "", 3.5, None, [], {}, "cpu:-4")),
    *({"@bytes": content} for content in ("a", "é", 3, None, [], {})),
    *({"@int": content} for content in (None, 3, "", "x", [], {})),
    *(
        {"@flag": [f"{HERE}:{kind}", value]}
        for kind, value in (("Bits", "ONE"), ("Bits", 64), ("Colour", "b"), ("Point", 1))
    ),
    *({"@complex": content} for content in (None, 3, [1, 2, 3], ["a", "b"], {}, [None])),
    *({"@size": content} for content in (["a"], 3, [[1]], [None], [1.5])),
    *(
        {tag: content}
        for tag in ("@tuple", "@deque", "@set", "@frozenset")
        for content in (3, None, True)
    ),
    *({"@deque": content} for content in ([[1], -1], [[1], "a"], [1, None], [[1]])),
    *({tag: [content]} for tag in ("@set", "@frozenset") for content in ([], {"a": 1})),
    *(
        {tag: content}
        for tag in ("@dict", "@ordered", "@counter")
        for content in (3, None, [1], [[1]], [[1, 2, 3]], [[[], 1]], "ab")
    ),
    *(
        {tag: content}
        for tag in ("@tensor", "@array")
        for content in (3, None, [], {}, "unknown", ["a"], ["a", "float32", [1]])
    ),
    deep_text(),
]


def test_an_invalid_text_is_a_checkpoint_error() -> None:
    found = [
        (error, content)
        for content in MALICIOUS
        if (error := outcome([{"around": content}])) != "CheckpointError"
    ]
    assert not found


def outcome(content: object) -> str:
    """The name of the error when ``content`` is read, or what was read."""

    def get(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        raise CheckpointError(f"no tensor {name}")  # as of a file without such an entry

    try:
        return f"read as {decode(content, 'extra', get)!r}"
    except Exception as error:
        return type(error).__name__


TAGS = [
    f"@{name}"
    for name in (
        "dict",
        "ordered",
        "counter",
        "tuple",
        "set",
        "frozenset",
        "deque",
        "size",
        "tensor",
        "array",
    )
]
TAGS += [
    f"@{name}"
    for name in (
        "int",
        "bytearray",
        "flag",
        "bytes",
        "complex",
        "dtype",
        "device",
        "object",
        "enum",
        "named_tuple",
        "tensor_of",
    )
]
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from([f"{HERE}:Point", f"{HERE}:Colour", "RED"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.tuples(
            st.sampled_from(TAGS),
            inner,
        ).map(lambda pair: dict([pair]))
    ),
    max_leaves=12,
)


@given(content=json_values)
def test_any_text_is_a_value_or_a_checkpoint_error(content: object) -> None:
    found = outcome(content)
    assert found == "CheckpointError" or found.startswith("read as ")


def test_a_value_of_an_earlier_version_is_named_with_what_to_do() -> None:
    with pytest.raises(
        CheckpointError, match=r"to do: +load an older checkpoint, or use the version"
    ) as caught:
        decode({"a": {"@object": ["elsewhere:Thing", {}]}}, "extra", getting({}))
    assert "where:    extra['a']" in str(caught.value)
    assert [line.strip().partition(":")[0] for line in str(caught.value).splitlines()[1:]] == [
        "expected",
        "got",
        "where",
        "to do",
    ]
