"""The contract of ParamStore, checked on three layouts, with all ranks of a group simulated in one
process.

A test decorated with ``each_case`` runs once for each layout, set of shapes and number of ranks."""

from __future__ import annotations

import copy
import typing
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import nn

from fsdp_compat._engine.group_memory import GroupMemory
from fsdp_compat._engine.store import ParamStore, ReduceForm
from fsdp_compat._stores.row_store import RowStore
from fsdp_compat.errors import StateError
from tests.support.cases import about
from tests.support.engine_build import CPU, STORES, gather_form, make_store, members_of

SHAPES: dict[str, list[tuple[int, ...]]] = {
    "divisible": [(4, 3), (12,), (2, 2, 6)],
    "odd": [(5, 3), (7,), (3, 2, 2)],
    "scalars": [(), (3,), ()],
    "empty": [(0,), (4, 2), (3, 0), (0, 5)],
    "nothing": [(0,), (2, 0)],
    "small": [(1,), (2,), (1, 3)],
    "lone": [(6, 4)],
    "lone odd": [(5, 3)],
    "lone scalar": [()],
}


class Holder(nn.Module):
    """Parameters of the given shapes. The first one is tied: a child holds it too."""

    def __init__(self, shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        for index, shape in enumerate(shapes):
            self.register_parameter(f"p{index}", nn.Parameter(torch.randn(shape).to(dtype)))
        self.child = nn.Module()
        self.child.again = next(self.parameters())


class Case(typing.NamedTuple):
    """One group: its store on every rank, and the values of its parameters."""

    stores: list[ParamStore]
    values: list[torch.Tensor]

    @property
    def ranks(self) -> int:
        return len(self.stores)

    def has_copies(self, value: torch.Tensor) -> bool:
        """True if every rank holds a parameter whole: a store that cuts rows cannot cut a
        scalar."""
        return not value.dim() and isinstance(self.stores[0], RowStore)

    def gathered(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the output of an all-gather, [ranks * S]."""
        return torch.cat([store.shard.to(dtype) for store in self.stores])

    def memory(self, dtype: torch.dtype = torch.float32) -> GroupMemory:
        """Return the memory of rank 0, unsharded and filled."""
        memory = GroupMemory(self.stores[0], self.ranks, dtype, CPU)
        if not memory.aliased:
            memory.allocate()
            memory.all_gather_output.data.copy_(self.gathered(dtype))
            memory.fill_unsharded_params()
        return memory


def build(
    kind: str, shapes: list[tuple[int, ...]], ranks: int, dtype: torch.dtype = torch.float32
) -> Case:
    original = Holder(shapes, dtype)
    stores = [store_of(copy.deepcopy(original), kind, rank, ranks) for rank in range(ranks)]
    return Case(stores, [p.detach().clone() for p in original.parameters()])


def store_of(module: nn.Module, kind: str, rank: int, ranks: int) -> ParamStore:
    flat_slot = (module, "_flat_param")
    return make_store(kind, members_of(module), rank=rank, ranks=ranks, flat_slot=flat_slot)


def all_equal(some: Iterable[torch.Tensor], others: Iterable[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


CASES = {
    f"{kind}-{name}-{ranks}": (kind, shapes, ranks)
    for kind in STORES
    for name, shapes in SHAPES.items()
    for ranks in (1, 2, 3, 4)
}


def each_case(check: Callable[[Case], None]) -> Callable[[], None]:
    """Turn a check of one case into a test of all cases."""

    def test() -> None:
        for name, arguments in CASES.items():
            with about(name):
                check(build(*arguments))

    test.__name__ = test.__qualname__ = check.__name__
    test.__doc__ = check.__doc__
    return test


def put_into(form: ReduceForm, values: list[torch.Tensor], buffer: torch.Tensor) -> None:
    """Copy the values to their places in the buffer, as the engine does with gradients."""
    for index, (value, places) in enumerate(
        zip(values, form.param_views(buffer)[:-1], strict=True)
    ):
        for part, place in zip(form.split(index, value), places, strict=True):
            place.copy_(part)


def taken_from(
    form: ReduceForm, values: list[torch.Tensor], buffer: torch.Tensor
) -> list[torch.Tensor]:
    """Copy the places in the buffer to tensors like ``values``. Where every rank has a copy of a
    value, the copies have to be the same."""
    found = [torch.empty_like(value) for value in values]
    for index, (value, places) in enumerate(zip(found, form.param_views(buffer)[:-1], strict=True)):
        if len(places) == 1 and places[0].numel() > value.numel():
            assert (places[0] == places[0][0]).all()
            value.copy_(places[0][0].view(value.shape))
            continue
        for part, place in zip(form.split(index, value), places, strict=True):
            part.copy_(place)
    return found


@each_case
def test_shards_have_one_size_and_every_parameter_once_and_pass_the_check(case: Case) -> None:
    assert len({store.numel for store in case.stores}) == 1
    for store in case.stores:
        assert store.numel >= 1
        assert store.numel * case.ranks >= sum(value.numel() for value in case.values)
        assert store.dtype == torch.float32
        assert store.shard.shape == (store.numel,)
        indices = [i for sharded in store.sharded_params for i in sharded.indices]
        assert sorted(indices) == list(range(len(case.values)))
        before = store.shard.clone()
        store.check("unit 'u'")
        assert torch.equal(store.shard, before)


@each_case
def test_all_ranks_agree_on_places_that_cover_the_buffer_exactly_once(case: Case) -> None:
    form = gather_form(case.stores[0])
    buffer = torch.zeros(case.ranks * form.numel, dtype=torch.int64)
    places = form.param_views(buffer)
    assert len(places) == len(case.values) + 1
    for views, value in zip(places[:-1], case.values, strict=True):
        copies = case.ranks if case.has_copies(value) else 1
        assert sum(view.numel() for view in views) == copies * value.numel()
    for view in (view for of_parameter in places for view in of_parameter):
        view.add_(1)
    assert buffer.tolist() == [1] * buffer.numel()
    buffer = torch.arange(case.ranks * form.numel)
    first, *others = [
        [[view.tolist() for view in views] for views in gather_form(store).param_views(buffer)]
        for store in case.stores
    ]
    assert all(other == first for other in others)


@each_case
def test_an_all_gather_restores_the_parameters_bit_by_bit_with_zero_padding(case: Case) -> None:
    form, gathered = gather_form(case.stores[0]), case.gathered(torch.float32)
    assert all_equal(taken_from(form, case.values, gathered), case.values)
    assert not any(view.any() for view in form.param_views(gathered)[-1])


@each_case
def test_unsharded_parameters_are_trainable_and_equal_the_originals(case: Case) -> None:
    memory = case.memory()
    params = memory.unsharded_params
    assert all_equal(params, case.values)  # in their shapes
    assert all(type(p) is nn.Parameter and p.is_leaf and p.requires_grad for p in params)
    buffer = memory.all_gather_output.untyped_storage()._cdata
    assert len({p.untyped_storage()._cdata == buffer for p in params}) == 1, "all view it, or none"
    converted = [value.to(torch.bfloat16) for value in case.values]
    assert all_equal(case.memory(torch.bfloat16).unsharded_params, converted)


@each_case
def test_sharded_gradients_have_the_layout_of_the_sharded_parameters(case: Case) -> None:
    for store in case.stores:
        total = torch.zeros(store.numel)
        grads = store.grads(total)
        assert len(grads) == len(store.sharded_params)
        for grad, (sharded, _) in zip(grads, store.sharded_params, strict=True):
            assert grad is not None
            assert grad.shape == sharded.shape
            if grad.numel():
                offset = sharded.data_ptr() - store.shard.data_ptr()
                assert grad.data_ptr() - total.data_ptr() == offset
            grad.add_(1)
        assert total.max() <= 1  # they do not overlap


@each_case
def test_gradients_at_once_are_written_as_one_by_one(case: Case) -> None:
    form = case.stores[0].reduce_form()
    if not form.can_pack_grads:
        return
    gradients = [torch.randn_like(value) for value in case.values]
    for given in (form.indices, form.indices[::-2]):
        expected = [g if i in given else torch.zeros_like(g) for i, g in enumerate(gradients)]
        one_by_one = torch.zeros(case.ranks * form.numel)
        put_into(form, expected, one_by_one)
        marks = torch.tensor([float(index in given) for index in form.indices])
        form.marks(one_by_one.view(case.ranks, -1)).copy_(marks)
        for dtype in (torch.float32, torch.float64):
            together = torch.full((case.ranks * form.numel,), torch.nan, dtype=dtype)
            values = [gradients[index] for index in given]
            form.pack_grads(together.view(case.ranks, -1), values, given)
            assert torch.equal(together, one_by_one.to(dtype))


# Changes of sharded parameters between steps that the flat stores refuse.


def refusal(store: ParamStore, change: Callable[[torch.Tensor], torch.Tensor]) -> str:
    """Give the first sharded parameter other data; return the error of the check."""
    sharded = store.sharded_params[0].parameter
    sharded.data = change(sharded.data)
    with pytest.raises(StateError) as caught:
        store.check("unit 'blocks.3'")
    return str(caught.value)


@pytest.mark.parametrize("kind", ["flat", "original"])
@pytest.mark.parametrize(
    ("change", "got"),
    [
        (torch.Tensor.double, "12 elements of torch.float64"),
        (lambda data: torch.zeros(13), "13 elements of torch.float32"),
        (lambda data: data[:2], "2 elements"),  # its address is right
    ],
)
def test_new_data_of_wrong_dtype_or_size_is_refused_with_four_facts(
    kind: str, change: Callable[[torch.Tensor], torch.Tensor], got: str
) -> None:
    text = refusal(build(kind, SHAPES["divisible"], 4).stores[0], change)
    assert "unit 'blocks.3'" in text and "to do:" in text
    assert "expected: 12 elements of torch.float32 on cpu" in text
    assert f"got:      {got}" in text


def test_data_of_another_size_for_an_empty_shard_is_refused_with_its_name() -> None:
    store = build("original", SHAPES["small"], 4).stores[3]
    assert not store.sharded_params[0].parameter.numel()
    assert "'p0'" in refusal(store, lambda data: torch.ones(2))
