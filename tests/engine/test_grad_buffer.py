"""Buffers of gradients: what is put into them, dropped and sent, over an axis that only records."""

from __future__ import annotations

import typing
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from fsdp_compat._comm.transport import ByRank, Handle, Traffic, Transport
from fsdp_compat._engine.behavior import ReduceAxes, ReducePolicy
from fsdp_compat._engine.reduce import DirectGradBuffer, ReduceBuffer, Reduction
from fsdp_compat._engine.store import ParamStore
from tests.support.engine_build import CPU, STORES, make_store, members_of
from tests.support.memory import buffer_nbytes

RANKS = 2
POLICY = ReducePolicy()
SHAPES: list[tuple[int, ...]] = [(3, 2), (5,), ()]


class Recorded:
    """An axis whose other ranks send the same as this one: a sum is ``ranks`` times this rank's
    values."""

    reads_later, reduce_steps = False, 0

    def __init__(self, ranks: int) -> None:
        self.rank, self.ranks, self.members, self.traffic = 0, ranks, tuple(range(ranks)), Traffic()
        self.sent: list[Tensor] = []  # a copy of every buffer

    def begin_reduce(self, buffer: Tensor, segments: ByRank, tag: int) -> Handle:
        sizes = {segments[rank].numel() * self.ranks for rank in range(self.ranks)}
        assert sizes == {buffer.numel()}
        self.sent.append(buffer.clone())
        return Handle([])

    def end_reduce(
        self, _: Handle, own: Tensor, dtype: torch.dtype, what: str, divisor: Tensor | None = None
    ) -> Tensor:
        return own.to(dtype) * self.ranks / (1 if divisor is None else divisor)


class Setup(typing.NamedTuple):
    store: ParamStore
    buffer: ReduceBuffer
    shard: Recorded

    def sent(self) -> list[Tensor]:
        """The gradients of all parameters in the last buffer that was sent, in their shapes."""
        found = [torch.full(shape, torch.nan) for shape in SHAPES]
        form = self.store.reduce_form()
        for index, (value, places) in enumerate(
            zip(found, form.param_views(self.shard.sent[-1])[:-1], strict=True)
        ):
            for part, place in zip(form.split(index, value), places, strict=True):
                if part.numel() > value.numel():  # every rank gets the whole gradient
                    value.copy_(place.reshape(-1, *value.shape)[0])
                else:
                    part.copy_(place)
        return found

    def reduce(self) -> list[Tensor]:
        return Reduction(self.buffer.reduce(POLICY, "the gradients of unit 'u'")).finish()


@pytest.fixture(params=[(kind, device) for kind in STORES for device in (False, True)])
def setup(request: pytest.FixtureRequest) -> Setup:
    kind, as_on_a_device = request.param
    return make_setup(kind, as_on_a_device=as_on_a_device)


def store_of(kind: str, ranks: int) -> ParamStore:
    module = nn.ParameterList(torch.randn(shape) for shape in SHAPES)
    slot = (module, "_flat_param")
    return make_store(kind, members_of(module), rank=0, ranks=ranks, flat_slot=slot)


def make_setup(
    kind: str,
    dtype: torch.dtype = torch.float32,
    *,
    as_on_a_device: bool = False,
    predivisor: float = 1.0,
) -> Setup:
    """as_on_a_device: write gradients as to a device with streams."""
    store = store_of(kind, RANKS)
    shard, alone = Recorded(RANKS), typing.cast(Transport, Recorded(1))
    axes = ReduceAxes(typing.cast(Transport, shard), alone, 4, 8)
    with mock.patch("fsdp_compat._engine.reduce.has_streams", return_value=as_on_a_device):
        buffer = ReduceBuffer(store.reduce_form(), axes, dtype, CPU, predivisor=predivisor)
    return Setup(store, buffer, shard)


def ones(index: int, value: float = 1.0) -> Tensor:
    return torch.full(SHAPES[index], value)


# -- received gradients

Put = tuple[list[int], list[float]]  # parameters, and the value of each gradient

# What is put (or, a list alone, dropped), and the values that are sent.
PUTS: dict[str, tuple[list[Put | list[int]], list[float]]] = {
    "nothing": ([], [0.0, 0.0, 0.0]),
    "missing ones": ([([1], [3.0])], [0.0, 3.0, 0.0]),
    "later ones": ([([1], [3.0]), ([1], [4.0]), ([1], [0.5])], [0.0, 7.5, 0.0]),
    "of several": ([([2, 0], [2.0, 1.0]), ([0, 1], [1.0, 5.0])], [2.0, 5.0, 2.0]),
    "twice at once": ([([0, 1, 0], [2.0, 5.0, 3.0]), ([2, 2, 0], [1.0] * 3)], [6.0, 5.0, 2.0]),
    "one dropped": ([([0, 1], [2.0, 3.0]), [0], ([1], [1.0])], [0.0, 4.0, 0.0]),
    "a late one dropped": ([([0], [2.0]), ([1], [3.0]), [1]], [2.0, 0.0, 0.0]),
    "assigned again": ([([0], [2.0]), [0, 1], ([0], [8.0])], [8.0, 0.0, 0.0]),
}


def receive(buffer: ReduceBuffer | DirectGradBuffer, puts: list[Put | list[int]]) -> None:
    for each in puts:
        if isinstance(each, list):
            buffer.drop(each)
        else:
            indices, values = each
            buffer.put(indices, [ones(index, v) for index, v in zip(indices, values, strict=True)])


@pytest.mark.parametrize("name", PUTS)
def test_gradients_are_added_dropped_or_zero_in_every_reduction(setup: Setup, name: str) -> None:
    puts, expected = PUTS[name]
    for _ in range(2):  # assigned again after a reduction
        assert (len(setup.buffer.received), buffer_nbytes(setup.buffer)) == (0, 0)
        receive(setup.buffer, puts)
        assert bool(setup.buffer.received) == bool(puts)
        if puts:
            assert buffer_nbytes(setup.buffer) == 4 * RANKS * setup.buffer.form.numel
        grads = setup.reduce()
        assert [value.unique().tolist() for value in setup.sent()] == [[v] for v in expected]
        assert [grad.shape for grad in grads] == [p.shape for p, _ in setup.store.sharded_params]
        assert len({g.untyped_storage().data_ptr() for g in grads if g.numel()}) == 1


@pytest.mark.parametrize("as_on_a_device", [False, True])
@pytest.mark.parametrize(
    ("name", "used"),
    [
        ("missing ones", [1]),
        ("later ones", [1]),
        ("of several", [0, 1, 2]),
        ("one dropped", [1]),
        ("a late one dropped", [0]),
        ("assigned again", [0]),
    ],
)
def test_parameters_have_gradients_where_a_rank_has_used_them(
    name: str, used: list[int], as_on_a_device: bool
) -> None:
    setup = make_setup("row", as_on_a_device=as_on_a_device)
    for _ in range(2):
        receive(setup.buffer, PUTS[name][0])
        stages = setup.buffer.reduce(ReducePolicy(keeps_unused=False), "gradients")
        grads = Reduction(stages).finish()
        assert [index for index, grad in enumerate(grads) if grad is not None] == used


@pytest.mark.parametrize("kind", STORES)
def test_divisions_before_the_sum_give_the_same_bits_at_once(kind: str) -> None:
    """fp16, where the smallest values are rounded; fp32 values that fp16 cannot hold undivided."""
    found = []
    for as_on_a_device in (False, True):
        setup = make_setup(kind, torch.float16, as_on_a_device=as_on_a_device, predivisor=4.0)
        torch.manual_seed(0)
        for dtype, factor in ((torch.float16, 1e-5), (torch.float32, 1e5)):
            values = [(torch.randn(shape) * factor).to(dtype) for shape in SHAPES]
            setup.buffer.put([*range(len(values))], values)
            setup.reduce()
            found.append(torch.cat([value.reshape(-1) for value in setup.sent()]))
    tiny, huge, *at_once = found
    assert huge.isfinite().all() and huge.abs().max() > 1e4
    assert torch.equal(torch.stack([tiny, huge]), torch.stack(at_once))


# -- reducing


@pytest.mark.parametrize("kind", STORES)
def test_missing_gradients_and_padding_are_sent_as_zeros(kind: str) -> None:
    setup = make_setup(kind)
    setup.buffer.put([1], [ones(1, 3.0)])
    whole = setup.buffer.views.buffer
    whole[whole != 3.0] = 5.0  # as if allocated memory held other values
    setup.reduce()
    sent = setup.shard.sent[0]
    assert sorted(sent.unique().tolist()) == [0.0, 3.0]
    assert int((sent == 3.0).sum()) == 5


# -- one rank: direct gradients


def direct_buffer() -> DirectGradBuffer:
    return DirectGradBuffer(store_of("original", 1))


@pytest.mark.parametrize("name", [name for name in PUTS if name != "twice at once"])
def test_direct_gradients_are_added_dropped_or_zero(name: str) -> None:
    (puts, expected), buffer = PUTS[name], direct_buffer()
    receive(buffer, puts)
    found = Reduction(buffer.reduce(POLICY, "")).finish()
    assert [tuple(grad.shape) for grad in found] == SHAPES
    assert [grad.unique().tolist() for grad in found] == [[value] for value in expected]
    assert (len(buffer.received), buffer_nbytes(buffer)) == (0, 0)


@pytest.mark.parametrize("how", ["drop", "discard"])
@pytest.mark.parametrize("kind", [*STORES, "direct"])
def test_without_its_last_gradient_a_buffer_is_freed(kind: str, how: str) -> None:
    buffer = direct_buffer() if kind == "direct" else make_setup(kind).buffer
    buffer.put([0, 2], [ones(0), ones(2)])
    if how == "drop":
        buffer.drop([0])
        assert buffer_nbytes(buffer) > 0
        buffer.drop([1, 2])
    else:
        buffer.discard()
    assert (len(buffer.received), buffer_nbytes(buffer)) == (0, 0)
