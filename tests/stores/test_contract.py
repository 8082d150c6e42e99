"""The contract of ParamStore, checked on three layouts, with all ranks of a group simulated in one
process.

A test decorated with ``each_case`` runs once for each layout, set of shapes and number of ranks."""

from __future__ import annotations

import copy
import math
import typing
from collections.abc import Callable

import pytest
import torch
from torch import nn

from fsdp_compat._engine.storage import GroupMemory
from fsdp_compat._engine.store import ParamStore, ReduceForm
from fsdp_compat._stores.flat_store import FlatParameter
from fsdp_compat._stores.row_store import RowStore
from fsdp_compat.errors import StateError
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
    stores = []
    for rank in range(ranks):
        module = copy.deepcopy(original)
        stores.append(
            make_store(
                kind, members_of(module), rank=rank, ranks=ranks, home=(module, "_flat_param")
            )
        )
    return Case(stores, [p.detach().clone() for p in original.parameters()])


CASES = {
    f"{kind}-{name}-{ranks}": (kind, shapes, ranks)
    for kind in STORES
    for name, shapes in SHAPES.items()
    for ranks in (1, 2, 3, 4)
}


def each_case(check: Callable[[Case], None]) -> Callable[[], None]:
    """Turn a check of one case into a test of all cases, which names those that fail."""

    def test() -> None:
        failures: dict[str, Exception] = {}
        for name, arguments in CASES.items():
            try:
                check(build(*arguments))
            except Exception as error:
                failures[name] = error
        if failures:
            first, error = next(iter(failures.items()))
            raise AssertionError(
                f"{len(failures)} of {len(CASES)} cases failed: {', '.join(failures)}\n"
                f"{first}: {type(error).__name__}: {error}"
            ) from error

    test.__name__ = test.__qualname__ = check.__name__
    test.__doc__ = check.__doc__
    return test


def put_into(form: ReduceForm, values: list[torch.Tensor], buffer: torch.Tensor) -> None:
    """Copy the values to their places in the buffer, as the engine does with gradients."""
    for index, (value, places) in enumerate(zip(values, form.places(buffer)[:-1], strict=True)):
        for part, place in zip(form.split(index, value), places, strict=True):
            place.copy_(part)


def taken_from(
    form: ReduceForm, values: list[torch.Tensor], buffer: torch.Tensor
) -> list[torch.Tensor]:
    """Copy the places in the buffer to tensors like ``values``. Where every rank has a copy of a
    value, the copies have to be the same."""
    found = [torch.empty_like(value) for value in values]
    for index, (value, places) in enumerate(zip(found, form.places(buffer)[:-1], strict=True)):
        if len(places) == 1 and places[0].numel() > value.numel():
            assert (places[0] == places[0][0]).all()
            value.copy_(places[0][0].view(value.shape))
            continue
        for part, place in zip(form.split(index, value), places, strict=True):
            part.copy_(place)
    return found


@each_case
def test_all_ranks_have_shards_of_one_size_and_dtype(case: Case) -> None:
    assert len({store.numel for store in case.stores}) == 1
    for store in case.stores:
        assert store.numel >= 1
        assert store.numel * case.ranks >= sum(value.numel() for value in case.values)
        assert store.dtype == torch.float32
        assert store.shard.shape == (store.numel,)


@each_case
def test_places_cover_the_buffer_exactly_once(case: Case) -> None:
    form = gather_form(case.stores[0])
    buffer = torch.zeros(case.ranks * form.numel, dtype=torch.int64)
    places = form.places(buffer)
    assert len(places) == len(case.values) + 1
    for view in (view for of_parameter in places for view in of_parameter):
        view.add_(1)
    assert buffer.tolist() == [1] * buffer.numel()


@each_case
def test_all_ranks_agree_on_the_places(case: Case) -> None:
    buffer = torch.arange(case.ranks * case.stores[0].numel)
    first, *others = [
        [[view.tolist() for view in views] for views in gather_form(store).places(buffer)]
        for store in case.stores
    ]
    assert all(other == first for other in others)


@each_case
def test_the_places_of_a_parameter_hold_all_its_elements(case: Case) -> None:
    form = gather_form(case.stores[0])
    places = form.places(torch.empty(case.ranks * form.numel))[:-1]
    for views, value in zip(places, case.values, strict=True):
        copies = case.ranks if case.has_copies(value) else 1
        assert sum(view.numel() for view in views) == copies * value.numel()


@each_case
def test_split_gives_views_in_the_shapes_of_the_places(case: Case) -> None:
    form = gather_form(case.stores[0])
    places = form.places(torch.empty(case.ranks * form.numel))
    for index, value in enumerate(case.values):
        parts = form.split(index, value)
        assert [part.shape for part in parts] == [place.shape for place in places[index]]
        assert all(
            part.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()
            for part in parts
        )


@each_case
def test_split_accepts_values_of_any_strides(case: Case) -> None:
    form = gather_form(case.stores[0])
    for stretched in (False, True):
        values = [
            torch.full((), 2.0).expand(value.shape)
            if stretched
            else value.movedim(0, -1).contiguous().movedim(-1, 0)
            if value.dim()
            else value
            for value in case.values
        ]
        buffer = torch.zeros(case.ranks * form.numel)
        put_into(form, values, buffer)
        found = taken_from(form, case.values, buffer)
        assert all(torch.equal(one, other) for one, other in zip(found, values, strict=True))


@each_case
def test_an_all_gather_restores_the_parameters_bit_by_bit(case: Case) -> None:
    found = taken_from(gather_form(case.stores[0]), case.values, case.gathered(torch.float32))
    assert all(torch.equal(one, other) for one, other in zip(found, case.values, strict=True))


@each_case
def test_padding_is_zero(case: Case) -> None:
    *_, others = gather_form(case.stores[0]).places(case.gathered(torch.float32))
    assert all(not view.any() for view in others)


@each_case
def test_unsharded_parameters_have_shapes_and_values_of_the_originals(case: Case) -> None:
    memory = case.memory()
    assert [tuple(parameter.shape) for parameter in memory.unsharded_params] == [
        tuple(value.shape) for value in case.values
    ]
    assert all(
        torch.equal(parameter, value)
        for parameter, value in zip(memory.unsharded_params, case.values, strict=True)
    )


@each_case
def test_either_all_unsharded_parameters_view_the_buffer_or_none(case: Case) -> None:
    memory = case.memory()
    buffer = memory.all_gather_output.untyped_storage()._cdata
    assert (
        len({parameter.untyped_storage()._cdata == buffer for parameter in memory.unsharded_params})
        == 1
    )


@each_case
def test_unsharded_parameters_are_trainable_leaf_tensors(case: Case) -> None:
    for parameter in case.memory().unsharded_params:
        assert type(parameter) is nn.Parameter
        assert parameter.is_leaf
        assert parameter.requires_grad


@each_case
def test_unsharded_parameters_have_separate_version_counters(case: Case) -> None:
    memory = case.memory()
    before = [parameter._version for parameter in memory.unsharded_params]
    with torch.no_grad():
        for parameter in memory.unsharded_params:
            parameter.add_(0)
        # It is freed where the unsharded parameters are copies.
        if memory.all_gather_output.untyped_storage().nbytes():
            memory.all_gather_output.add_(0)
    assert [parameter._version for parameter in memory.unsharded_params] == [
        version + 1 for version in before
    ]


@each_case
def test_an_all_gather_in_another_dtype_converts_the_parameters(case: Case) -> None:
    memory = case.memory(torch.bfloat16)
    assert all(
        torch.equal(parameter, value.to(torch.bfloat16))
        for parameter, value in zip(memory.unsharded_params, case.values, strict=True)
    )


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
def test_gradients_reach_the_sharded_parameters_with_the_same_elements(case: Case) -> None:
    gradients = [torch.randn_like(value) for value in case.values]
    forms = [store.reduce_form() for store in case.stores]
    buffer = torch.zeros(case.ranks * forms[0].numel)
    put_into(forms[0], gradients, buffer)
    found: list[list[torch.Tensor]] = [[] for _ in gradients]
    for store, form, total in zip(case.stores, forms, buffer.chunk(case.ranks), strict=True):
        for grad, (sharded, unsharded) in zip(form.grads(total), store.sharded_params, strict=True):
            assert grad is not None
            assert grad.shape == sharded.shape
            if isinstance(sharded, FlatParameter):  # one for all: the shard itself
                assert list(unsharded) == list(range(len(case.values)))
                assert torch.equal(grad, total)
            else:
                assert len(unsharded) == 1
                found[unsharded[0]].append(grad.reshape(-1))
    if any(found):
        for parts, gradient in zip(found, gradients, strict=True):
            whole = parts[0] if case.has_copies(gradient) else torch.cat(parts)
            assert torch.equal(whole, gradient.reshape(-1))
            assert not case.has_copies(gradient) or all(torch.equal(p, whole) for p in parts)


@each_case
def test_all_gradients_at_once_are_written_as_one_by_one(case: Case) -> None:
    form = case.stores[0].reduce_form()
    if not form.takes_all:
        return
    gradients = [torch.randn_like(value) for value in case.values]
    one_by_one = torch.zeros(case.ranks * form.numel)
    put_into(form, gradients, one_by_one)
    form.marks(one_by_one.view(case.ranks, -1)).fill_(1)
    for dtype in (torch.float32, torch.float64):
        together = torch.full((case.ranks * form.numel,), torch.nan, dtype=dtype)
        form.put_all(together.view(case.ranks, -1), gradients)
        assert torch.equal(together, one_by_one.to(dtype))


@each_case
def test_every_parameter_belongs_to_exactly_one_sharded_parameter(case: Case) -> None:
    for store in case.stores:
        assert sorted(
            index for sharded in store.sharded_params for index in sharded.unsharded_params
        ) == list(range(len(case.values)))


@each_case
def test_sharded_and_unsharded_modules_show_the_same_attributes_in_the_same_order(
    case: Case,
) -> None:
    full, sharded = case.stores[0].shown(case.memory().unsharded_params), case.stores[0].shown(None)
    assert [(id(slot.module), slot.attribute) for slot in full] == [
        (id(slot.module), slot.attribute) for slot in sharded
    ]


@each_case
def test_a_tied_parameter_is_shown_under_each_of_its_names(case: Case) -> None:
    memory = case.memory()
    shown = [
        slot.attribute
        for slot in case.stores[0].shown(memory.unsharded_params)
        if slot.parameter is memory.unsharded_params[0]
    ]
    assert shown == ["p0", "again"]


@each_case
def test_sharded_parameters_are_shown_only_while_sharded(case: Case) -> None:
    unsharded = case.memory().unsharded_params
    store = case.stores[0]
    sharded = {id(sharded) for sharded, _ in store.sharded_params}
    assert {
        id(slot.parameter) for slot in store.shown(None) if slot.parameter is not None
    } == sharded
    assert not any(id(slot.parameter) in sharded for slot in store.shown(unsharded))


@each_case
def test_an_unchanged_store_passes_the_check(case: Case) -> None:
    for store in case.stores:
        before = store.shard.clone()
        store.check("unit 'u'")
        assert torch.equal(store.shard, before)


@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_a_store_keeps_the_dtype_of_its_parameters(kind: str, dtype: torch.dtype) -> None:
    case = build(kind, SHAPES["odd"], 3, dtype)
    assert case.stores[0].dtype == dtype
    assert all(
        sharded.dtype == dtype for store in case.stores for sharded, _ in store.sharded_params
    )
    found = taken_from(gather_form(case.stores[0]), case.values, case.gathered(dtype))
    assert all(torch.equal(one, other) for one, other in zip(found, case.values, strict=True))


@pytest.mark.parametrize("kind", STORES)
def test_frozen_parameters_are_frozen_sharded_and_unsharded(kind: str) -> None:
    module = Holder([(3, 2), (4,)]).requires_grad_(False)
    store = make_store(kind, members_of(module), rank=0, ranks=2, home=(module, "_flat_param"))
    assert not any(sharded.requires_grad for sharded, _ in store.sharded_params)
    assert not any(
        parameter.requires_grad
        for parameter in GroupMemory(store, 2, torch.float32, CPU).unsharded_params
    )


@pytest.mark.parametrize("kind", ["flat", "original"])
def test_every_parameter_of_a_flat_store_starts_at_sixteen_bytes(kind: str) -> None:
    for dtype, size in [(torch.float32, 4), (torch.bfloat16, 2), (torch.float64, 8)]:
        store = build(kind, SHAPES["odd"], 2, dtype).stores[0]
        assert store.numel * size % 16 == 0
        buffer = torch.empty(2 * store.numel, dtype=dtype)
        assert all(
            (view.data_ptr() - buffer.data_ptr()) % 16 == 0
            for views in store.places(buffer)[:-1]
            for view in views
        )


@pytest.mark.parametrize(
    ("ranks", "shapes"),
    [(1, [(5, 3), (7,), (3, 2, 2)]), (2, [(15,), (4,), (0,)]), (3, [(12,), (0,), (0,)])],
)
def test_original_parameters_become_views_of_the_flat_shard(
    ranks: int, shapes: list[tuple[int, ...]]
) -> None:
    module = Holder(SHAPES["odd"])
    parameters = list(module.parameters())
    store = make_store(
        "original", members_of(module), rank=0, ranks=ranks, home=(module, "_flat_param")
    )
    assert all(
        sharded is parameter
        for (sharded, _), parameter in zip(store.sharded_params, parameters, strict=True)
    )
    assert [tuple(parameter.shape) for parameter in parameters] == shapes


# Changes that user code makes to sharded parameters between steps: the flat stores adopt them or
# refuse them.


@pytest.mark.parametrize("kind", ["flat", "original"])
def test_new_data_of_a_parameter_is_copied_into_the_shard(kind: str) -> None:
    case = build(kind, SHAPES["divisible"], 2)
    store = case.stores[0]
    sharded = store.sharded_params[0].parameter
    sharded.data = torch.full_like(sharded, 5.0)
    store.check("unit 'u'")
    shard = store.shard
    assert sharded.data_ptr() == shard.data_ptr()
    assert shard[: sharded.numel()].tolist() == [5.0] * sharded.numel()


def test_a_whole_parameter_as_data_is_cut_into_the_parts_of_the_ranks() -> None:
    case = build("original", SHAPES["divisible"], 4)
    found = []
    for store in case.stores:
        sharded = store.sharded_params[0].parameter
        sharded.data = torch.arange(12.0).view(4, 3)
        store.check("unit 'u'")
        assert sharded.shape == store.grads(store.shard)[0].shape
        found += sharded.tolist()
        assert store.is_intact()
    assert found == list(range(12))


def test_new_data_of_one_parameter_leaves_the_others_unchanged() -> None:
    case = build("original", SHAPES["divisible"], 2)
    store = case.stores[1]
    before = [sharded.detach().clone() for sharded, _ in store.sharded_params]
    store.sharded_params[-1].parameter.data = before[-1] * 2
    store.check("unit 'u'")
    assert torch.equal(store.sharded_params[-1].parameter.detach(), before[-1] * 2)
    assert all(
        torch.equal(sharded.detach(), old)
        for (sharded, _), old in zip(store.sharded_params[:-1], before, strict=False)
    )


@pytest.mark.parametrize("kind", ["flat", "original"])
@pytest.mark.parametrize("change", ["dtype", "size"])
def test_new_data_of_wrong_dtype_or_size_is_refused_with_four_facts(kind: str, change: str) -> None:
    store = build(kind, SHAPES["divisible"], 2).stores[0]
    sharded = store.sharded_params[0].parameter
    sharded.data = (
        sharded.data.double() if change == "dtype" else torch.zeros(math.prod(sharded.shape) + 1)
    )
    with pytest.raises(StateError) as caught:
        store.check("unit 'blocks.3'")
    text = str(caught.value)
    assert "unit 'blocks.3'" in text
    assert (
        f"expected: {sharded.numel() if change == 'dtype' else sharded.numel() - 1} elements of "
        "torch.float32 on cpu" in text
    )
    assert (
        f"got:      {sharded.numel()} elements of "
        f"{'torch.float64' if change == 'dtype' else 'torch.float32'} on cpu" in text
    )
    assert "to do:" in text


def test_the_error_names_the_original_parameter() -> None:
    store = build("original", SHAPES["divisible"], 2).stores[0]
    store.sharded_params[1].parameter.data = torch.zeros(99)
    with pytest.raises(StateError, match="'p1'"):
        store.check("unit 'u'")


@pytest.mark.parametrize("kind", ["flat", "original"])
def test_a_part_of_the_same_data_is_refused(kind: str) -> None:
    """Its address is right, but the optimizer would update only a part of the shard."""
    store = build(kind, SHAPES["divisible"], 2).stores[0]
    sharded = store.sharded_params[0].parameter
    sharded.data = sharded.data[:2]
    with pytest.raises(StateError):
        store.check("unit 'u'")


def test_a_whole_parameter_as_data_of_an_empty_shard_is_refused() -> None:
    store = build("original", SHAPES["small"], 4).stores[3]
    sharded = next(sharded for sharded, _ in store.sharded_params if not sharded.numel())
    sharded.data = torch.ones(2)
    with pytest.raises(StateError):
        store.check("unit 'u'")
