"""``extra``: what is saved comes back as it was, what is no data is refused, and no text that is
read runs any code."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import math
import random
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat import checkpoint
from fsdp_compat.errors import CheckpointError, UsageError
from tests.support.cases import about
from tests.support.checkpoints import Forgery, refused
from tests.support.ranks import on_ranks

HERE = __name__


class Colour(enum.Enum):
    RED = 1


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


class Saved:
    """Saves and loads values beside a model of one rank."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._model = folder, FSDP(nn.Linear(1, 1))
        self._steps = iter(range(10**8))

    def save(self, value: object) -> Path:
        return checkpoint.save(self._folder, self._model, extra=value, step=next(self._steps))

    def load(self, path: Path) -> Any:
        return checkpoint.load(path, self._model).extra

    def through_files(self, value: object) -> Any:
        return self.load(self.save(value))

    def forged(self, good: Path, extra: Callable[[Any], Any]) -> Any:
        """Load ``extra`` of the text of a good checkpoint, in its place."""
        forgery = Forgery(good)
        forgery.text["extra"] = extra(forgery.text["extra"])
        forgery.write(self._folder / "forged")
        return self.load(self._folder / "forged")


def as_text(value: Any) -> Any:
    """What a value is: its type, dtype and order, the sign of zero, and NaN as NaN."""
    if isinstance(value, Tensor | np.ndarray):
        return type(value).__name__, str(value.dtype), tuple(value.shape), repr(value.tolist())
    if isinstance(value, set | frozenset):
        inside: Any = sorted(map(str, map(as_text, value)))
    elif isinstance(value, dict):
        inside = [(as_text(key), as_text(each)) for key, each in value.items()]
    elif isinstance(value, list | tuple | collections.deque):
        inside = [*map(as_text, value), getattr(value, "maxlen", None)]
    else:
        inside = repr(value)
    return type(value).__name__, inside


def assert_same(actual: Any, expected: Any) -> None:
    assert as_text(actual) == as_text(expected)


# -- what is data


numbers = st.integers() | st.integers(-(2**200), 2**200) | st.floats() | st.booleans()
keys = st.recursive(
    st.none() | numbers | st.text() | st.text().map("@{}".format) | st.binary(),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=5,
)
leaves = st.one_of(
    keys,
    st.complex_numbers(),
    st.sampled_from([torch.bfloat16, torch.complex64, torch.device("cuda:1")]),
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


random_python, random_legacy = random.Random(3), np.random.RandomState(3)
random_python.gauss(0, 1), random_legacy.standard_normal()  # these keep the next one
EXAMPLES: dict[str, Any] = {
    "arrays": [
        *(np.array([1.5, np.nan, -0.0]), np.array(7, np.uint8), np.zeros((0, 3), np.float16)),
        *(np.array([[True], [False]]), np.array([1 + 2j], np.complex64), np.arange(5)[::-2]),
        np.arange(6, dtype=np.int64).reshape(2, 3).T,
    ],
    "tags": [{"@tensor": "t0"}, {"@object": ["os:system", {}]}, {"@": 1}, {"": {"@set": [1]}}],
    "keys": {True: "bool", 2: 1, 2.5: 1, None: 1, (1, ("a", b"c")): "", "@x": 1, "x": 2},
    "empty": [{}, [], (), "", set(), frozenset(), collections.deque()],
    "bounded": collections.deque([1, (2,)], maxlen=3),
    "counter": collections.Counter({"a": 2, "b": -1, ("c", 1): 0}),
    "order": collections.OrderedDict([("b", 1), ("a", 2)]),
    "text": "\ud800 and \x00 and é",
    "tensors": [
        torch.tensor(1.5),
        torch.empty(0, 3),
        torch.tensor([0.1, math.nan, math.inf], dtype=torch.bfloat16),
        torch.arange(6).reshape(2, 3).t(),
        torch.ones(3).to(torch.float8_e8m0fnu).view(torch.float8_e4m3fnuz),
        torch.ones(3).to(torch.float8_e8m0fnu),  # safetensors has no name for it
    ],
    "random states": [
        *(random_python.getstate(), random_legacy.get_state(), torch.get_rng_state()),
        np.random.default_rng(3).bit_generator.state,
    ],
}


@on_ranks(1)
def test_every_value_comes_back_with_its_type_and_its_order(tmp_path: Path) -> None:
    saved = Saved(tmp_path)

    @settings(max_examples=25, deadline=None)
    @example(some=[*EXAMPLES.values()])
    @given(some=st.lists(values, max_size=5))  # a save takes longer than a value
    def check(some: list[Any]) -> None:
        found = saved.through_files(some)
        assert_same(found, some)

    check()
    for around in (lambda inner: (inner,), lambda inner: {1: inner}):
        deepest = functools.reduce(lambda inner, _, its=around: its(inner), range(65), 0)
        assert_same(saved.through_files(deepest), deepest)


@pytest.mark.filterwarnings("error")
@on_ranks(1)
def test_values_of_some_classes_come_back_as_the_plain_value(tmp_path: Path) -> None:
    shared, conjugated = [1], torch.tensor([1 + 2j]).conj()  # whose memory holds other numbers
    pairs = [
        ([Point(1, [2]), [Point(Point(3))]], [(1, [2]), [((3, 0), 0)]]),
        (torch.ones(2).max(0), (torch.tensor(1.0), torch.tensor(0))),  # a named tuple
        (torch.__version__, str(torch.__version__)),
        (nn.Parameter(torch.ones(2)), torch.ones(2)),
        (collections.defaultdict(list, {1: [2]}), {1: [2]}),
        ([shared, {"a": shared}], [[1], {"a": [1]}]),  # twice is not a cycle
        ([conjugated, conjugated.imag], [torch.tensor([1 - 2j]), torch.tensor([-2.0])]),
        ([np.float32(0.5), np.float64(np.inf), np.int8(-3)], [0.5, math.inf, -3]),
        ([np.bool_(True), np.complex64(1j), np.str_("a")], [True, 1j, "a"]),
        (np.broadcast_to(np.array([1, 2]), (2, 2)), np.array([[1, 2]] * 2)),  # cannot be written to
    ]
    given, expected = ([*each] for each in zip(*pairs, strict=True))
    assert_same(Saved(tmp_path).through_files(given), expected)


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
        "function": as_text,
        "module": linear,
        "generator": (i for i in range(3)),
        "cycle": cycle,
        "depth": functools.reduce(lambda inner, _: [inner], range(5000), 0),
        "66 levels": functools.reduce(lambda inner, _: (inner,), range(66), 0),
        "object": Noisy(),
        "dataclass": Progress(3),
        "enum": Colour.RED,
        "text that is an enum": Letter.A,
        "dict of another class": type("Own", (dict,), {})(),
        "array of objects": np.array([object()]),
        "masked array": np.ma.masked_array([1, 2], [True, False]),
        "structured array": np.zeros(2, [("a", "i4")]),
        "long double": np.longdouble(1),
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
@on_ranks(1)
def test_objects_that_are_not_data_are_refused_with_their_place_and_run_no_code(
    tmp_path: Path,
) -> None:
    saved = Saved(tmp_path)
    for name, value in no_data().items():
        place = "extra" if name in ("depth", "66 levels") else "extra['a'][1]"
        with about(name), refused(UsageError, "A value cannot be saved", f"where:    {place}"):
            saved.save({"a": [0, value]})
    noisy = Noisy()
    deque = collections.deque([noisy])
    for content in (noisy, [noisy], (noisy,), {"a": noisy}, {1: noisy}, Point(noisy), deque):
        ran.clear()
        with refused(UsageError, "a tests.checkpoint.test_values.Noisy"):
            saved.save(content)
        assert not ran
    for content in ({print: 1}, {(1, print): 2}, [{1, print}]):
        with pytest.raises(UsageError, match=r"builtins.(builtin_function_or_method|tuple)"):
            saved.save(content)
    assert not [*tmp_path.iterdir()]


# -- what is read

KEYS = [[], {"a": 1}, {"@object": [f"{HERE}:Noisy", {}]}, {"@tuple": [1, {"@enum": []}]}]
PAIRS = [3, None, [1], [[1]], [[1, 2, 3]], "ab", *([[key, 1], [key, 2]] for key in KEYS)]
UNKNOWN = [None, [], {}, ["os:system", {}], [f"{HERE}:Noisy", {"loud": 1}], ["importing:Any", {}]]
# Invalid contents of each tag.
INVALID: dict[str, list[Any]] = {
    "@dtype": ["load", "nn", "float32.is_complex", 3, None],
    "@device": ["nonsense", "", 3.5, None, "cpu:-4"],
    **{tag: ["a", "é", 3, None] for tag in ("@bytes", "@bytearray")},
    "@int": [None, 3, "x", []],
    "@complex": [None, 3, [1, 2, 3], ["a", "b"], {}],
    "@size": [["a"], 3, [[1]], [1.5]],
    "@tuple": [3, None, [{"@object": ["os:system", {}]}]],
    "@deque": [3, None, [[1], -1], [[1], "a"], [1, None], [[1]]],
    **{tag: [3, None, *([key, key] for key in KEYS)] for tag in ("@set", "@frozenset")},
    **{tag: PAIRS for tag in ("@dict", "@ordered", "@counter")},
    **{tag: [3, None, "a", ["a"], ["a", "nn", [1]]] for tag in ("@tensor", "@array")},
    **{tag: UNKNOWN for tag in ("@", "@object", "@enum", "@tensor_of", "@call", "@reduce")},
}


@on_ranks(1)
def test_an_invalid_text_is_a_checkpoint_error_and_runs_and_imports_nothing(tmp_path: Path) -> None:
    """A module may import others when an attribute of it is asked for; torch does."""
    module = types.ModuleType("importing")
    module.__getattr__ = lambda name: pytest.fail(f"asked for {name}")  # type: ignore[method-assign]
    saved = Saved(tmp_path)
    good = saved.save(torch.ones(1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "importing", module)
        before = set(sys.modules)
        ran.clear()
        for content in ({tag: each} for tag, every in INVALID.items() for each in every):
            with about(content), pytest.raises(CheckpointError):
                saved.forged(good, lambda tensor, its=content: [{"around": its}])
        assert not ran
        assert set(sys.modules) == before
    for tag in ("@dict", "@ordered", "@counter", "@set", "@frozenset"):
        with pytest.raises(CheckpointError, match="cannot be a key"):
            saved.forged(good, lambda it, tag=tag: {tag: [it] if "set" in tag else [[it, 1]]})
    with refused(CheckpointError, "'@object', which this version", "load an older", "extra['a']"):
        saved.forged(good, lambda _: {"a": {"@object": ["elsewhere:Thing", {}]}})
