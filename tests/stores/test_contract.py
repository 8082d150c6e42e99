"""What every layout behind the seam promises, over three of them, with all ranks of a group
simulated in one process."""

from __future__ import annotations

import copy
import math
import typing

import pytest
import torch
from torch import nn

from fsdp_compat._engine.storage import GroupMemory
from fsdp_compat._engine.store import ParamStore
from fsdp_compat._stores.registration import FlatParameter
from fsdp_compat.errors import StateError
from tests.support.engine_build import CPU, STORES, make_store, members_of

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
    """Parameters of the given shapes, the first of them tied: it is held a second time, by a
    child."""

    def __init__(self, shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        for index, shape in enumerate(shapes):
            self.register_parameter(f"p{index}", nn.Parameter(torch.randn(shape).to(dtype)))
        self.child = nn.Module()
        self.child.again = next(self.parameters())


class Case(typing.NamedTuple):
    """One group: the same store on every rank, and the values it was made of."""

    stores: list[ParamStore]
    values: list[torch.Tensor]

    @property
    def ranks(self) -> int:
        return len(self.stores)

    def gathered(self, dtype: torch.dtype) -> torch.Tensor:
        """[ranks * S]: what a gather receives."""
        return torch.cat([store.shard.to(dtype) for store in self.stores])

    def memory(self, dtype: torch.dtype = torch.float32) -> GroupMemory:
        """The full form on rank 0, filled."""
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


@pytest.fixture(
    params=[
        f"{kind}-{name}-{ranks}" for kind in STORES for name in SHAPES for ranks in (1, 2, 3, 4)
    ]
)
def case(request: pytest.FixtureRequest) -> Case:
    kind, name, ranks = request.param.split("-")
    return build(kind, SHAPES[name], int(ranks))


def put_into(store: ParamStore, values: list[torch.Tensor], buffer: torch.Tensor) -> None:
    """What the engine does with gradients: the values go to their places in the buffer."""
    for index, (value, places) in enumerate(zip(values, store.places(buffer)[:-1], strict=True)):
        for part, place in zip(store.split(index, value), places, strict=True):
            place.copy_(part)


def taken_from(
    store: ParamStore, values: list[torch.Tensor], buffer: torch.Tensor
) -> list[torch.Tensor]:
    """What the engine does with parameters: the places in the buffer go to tensors like
    ``values``."""
    found = [torch.empty_like(value) for value in values]
    for index, (value, places) in enumerate(zip(found, store.places(buffer)[:-1], strict=True)):
        for part, place in zip(store.split(index, value), places, strict=True):
            part.copy_(place)
    return found


def test_all_ranks_have_shards_of_one_size_and_dtype(case: Case) -> None:
    assert len({store.numel for store in case.stores}) == 1
    for store in case.stores:
        assert store.numel >= 1
        assert store.numel * case.ranks >= sum(value.numel() for value in case.values)
        assert store.dtype == torch.float32
        assert store.shard.shape == (store.numel,)


def test_places_cover_the_buffer_exactly_once(case: Case) -> None:
    store = case.stores[0]
    buffer = torch.zeros(case.ranks * store.numel, dtype=torch.int64)
    places = store.places(buffer)
    assert len(places) == len(case.values) + 1
    for view in (view for of_leaf in places for view in of_leaf):
        view.add_(1)
    assert buffer.tolist() == [1] * buffer.numel()


def test_all_ranks_agree_on_the_places(case: Case) -> None:
    buffer = torch.arange(case.ranks * case.stores[0].numel)
    first, *others = [
        [[view.tolist() for view in views] for views in store.places(buffer)]
        for store in case.stores
    ]
    assert all(other == first for other in others)


def test_the_places_of_a_leaf_hold_as_many_elements_as_it_has(case: Case) -> None:
    store = case.stores[0]
    places = store.places(torch.empty(case.ranks * store.numel))[:-1]
    assert [sum(view.numel() for view in views) for views in places] == [
        value.numel() for value in case.values
    ]


def test_split_gives_views_in_the_shapes_of_the_places(case: Case) -> None:
    store = case.stores[0]
    places = store.places(torch.empty(case.ranks * store.numel))
    for index, value in enumerate(case.values):
        parts = store.split(index, value)
        assert [part.shape for part in parts] == [place.shape for place in places[index]]
        assert all(
            part.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()
            for part in parts
        )


def test_split_takes_values_of_any_strides(case: Case) -> None:
    store = case.stores[0]
    for stretched in (False, True):
        values = [
            torch.full((), 2.0).expand(value.shape)
            if stretched
            else value.movedim(0, -1).contiguous().movedim(-1, 0)
            if value.dim()
            else value
            for value in case.values
        ]
        buffer = torch.zeros(case.ranks * store.numel)
        put_into(store, values, buffer)
        found = taken_from(store, case.values, buffer)
        assert all(torch.equal(one, other) for one, other in zip(found, values, strict=True))


def test_what_all_ranks_send_gives_the_parameters_bit_by_bit_through_the_places(case: Case) -> None:
    found = taken_from(case.stores[0], case.values, case.gathered(torch.float32))
    assert all(torch.equal(one, other) for one, other in zip(found, case.values, strict=True))


def test_padding_is_zero(case: Case) -> None:
    *_, others = case.stores[0].places(case.gathered(torch.float32))
    assert all(not view.any() for view in others)


def test_leaves_are_the_parameters_after_a_gather(case: Case) -> None:
    memory = case.memory()
    assert [tuple(leaf.shape) for leaf in memory.unsharded_params] == [
        tuple(value.shape) for value in case.values
    ]
    assert all(
        torch.equal(leaf, value)
        for leaf, value in zip(memory.unsharded_params, case.values, strict=True)
    )


def test_leaves_either_all_view_the_buffer_or_none_does(case: Case) -> None:
    memory = case.memory()
    buffer = memory.all_gather_output.untyped_storage()._cdata
    assert len({leaf.untyped_storage()._cdata == buffer for leaf in memory.unsharded_params}) == 1


def test_leaves_are_trainable_parameters_without_history(case: Case) -> None:
    for leaf in case.memory().unsharded_params:
        assert type(leaf) is nn.Parameter
        assert leaf.is_leaf
        assert leaf.requires_grad


def test_leaves_have_version_counters_of_their_own(case: Case) -> None:
    memory = case.memory()
    before = [leaf._version for leaf in memory.unsharded_params]
    with torch.no_grad():
        for leaf in memory.unsharded_params:
            leaf.add_(0)
        if (
            memory.all_gather_output.untyped_storage().nbytes()
        ):  # leaves that were filled by a copy have let it go
            memory.all_gather_output.add_(0)
    assert [leaf._version for leaf in memory.unsharded_params] == [
        version + 1 for version in before
    ]


def test_a_gather_in_another_dtype_gives_leaves_of_that_dtype(case: Case) -> None:
    memory = case.memory(torch.bfloat16)
    assert all(
        torch.equal(leaf, value.to(torch.bfloat16))
        for leaf, value in zip(memory.unsharded_params, case.values, strict=True)
    )


def test_a_gradient_is_a_view_of_the_total_that_lies_as_its_target_lies_in_the_shard(
    case: Case,
) -> None:
    for store in case.stores:
        total = torch.zeros(store.numel)
        grads = store.grads(total)
        assert len(grads) == len(store.sharded_params)
        for grad, (target, _) in zip(grads, store.sharded_params, strict=True):
            assert grad.shape == target.shape
            if grad.numel():
                offset = target.data_ptr() - store.shard.data_ptr()
                assert grad.data_ptr() - total.data_ptr() == offset
            grad.add_(1)
        assert total.max() <= 1  # they do not overlap


def test_gradients_of_leaves_reach_the_targets_that_hold_their_elements(case: Case) -> None:
    gradients = [torch.randn_like(value) for value in case.values]
    buffer = torch.zeros(case.ranks * case.stores[0].numel)
    put_into(case.stores[0], gradients, buffer)
    found: list[list[torch.Tensor]] = [[] for _ in gradients]
    for store, total in zip(case.stores, buffer.chunk(case.ranks), strict=True):
        for grad, (target, leaves) in zip(store.grads(total), store.sharded_params, strict=True):
            if isinstance(target, FlatParameter):  # one for all: the shard itself
                assert list(leaves) == list(range(len(case.values)))
                assert torch.equal(grad, total)
            else:
                assert len(leaves) == 1
                found[leaves[0]].append(grad.reshape(-1))
    if any(found):
        assert all(
            torch.equal(torch.cat(parts), g.reshape(-1))
            for parts, g in zip(found, gradients, strict=True)
        )


def test_every_leaf_has_exactly_one_target(case: Case) -> None:
    for store in case.stores:
        assert sorted(
            index for target in store.sharded_params for index in target.unsharded_params
        ) == list(range(len(case.values)))


def test_full_and_sharded_forms_name_the_same_attributes_in_the_same_order(case: Case) -> None:
    full, sharded = case.stores[0].shown(case.memory().unsharded_params), case.stores[0].shown(None)
    assert [(id(slot.module), slot.attribute) for slot in full] == [
        (id(slot.module), slot.attribute) for slot in sharded
    ]


def test_a_tied_parameter_is_shown_at_each_of_its_places(case: Case) -> None:
    memory = case.memory()
    shown = [
        slot.attribute
        for slot in case.stores[0].shown(memory.unsharded_params)
        if slot.parameter is memory.unsharded_params[0]
    ]
    assert shown == ["p0", "again"]


def test_a_target_is_shown_while_sharded_and_not_while_full(case: Case) -> None:
    leaves = case.memory().unsharded_params
    store = case.stores[0]
    targets = {id(target) for target, _ in store.sharded_params}
    assert {
        id(slot.parameter) for slot in store.shown(None) if slot.parameter is not None
    } == targets
    assert not any(id(slot.parameter) in targets for slot in store.shown(leaves))


def test_a_store_that_nobody_touched_passes_the_check(case: Case) -> None:
    for store in case.stores:
        before = store.shard.clone()
        store.check("unit 'u'")
        assert torch.equal(store.shard, before)


@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_a_store_keeps_the_dtype_of_its_parameters(kind: str, dtype: torch.dtype) -> None:
    case = build(kind, SHAPES["odd"], 3, dtype)
    assert case.stores[0].dtype == dtype
    assert all(target.dtype == dtype for store in case.stores for target, _ in store.sharded_params)
    found = taken_from(case.stores[0], case.values, case.gathered(dtype))
    assert all(torch.equal(one, other) for one, other in zip(found, case.values, strict=True))


@pytest.mark.parametrize("kind", STORES)
def test_targets_and_leaves_of_frozen_parameters_are_frozen(kind: str) -> None:
    module = Holder([(3, 2), (4,)]).requires_grad_(False)
    store = make_store(kind, members_of(module), rank=0, ranks=2, home=(module, "_flat_param"))
    assert not any(target.requires_grad for target, _ in store.sharded_params)
    assert not any(
        leaf.requires_grad for leaf in GroupMemory(store, 2, torch.float32, CPU).unsharded_params
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
def test_originals_stay_the_same_objects_as_views_of_a_flat_shard(
    ranks: int, shapes: list[tuple[int, ...]]
) -> None:
    module = Holder(SHAPES["odd"])
    parameters = list(module.parameters())
    store = make_store(
        "original", members_of(module), rank=0, ranks=ranks, home=(module, "_flat_param")
    )
    assert all(
        target is parameter
        for (target, _), parameter in zip(store.sharded_params, parameters, strict=True)
    )
    assert [tuple(parameter.shape) for parameter in parameters] == shapes


# What somebody may do to targets between steps: the flat stores put it right or refuse it.


@pytest.mark.parametrize("kind", ["flat", "original"])
def test_values_assigned_as_new_data_are_adopted_into_the_shard(kind: str) -> None:
    case = build(kind, SHAPES["divisible"], 2)
    store = case.stores[0]
    target = store.sharded_params[0].parameter
    target.data = torch.full_like(target, 5.0)
    store.check("unit 'u'")
    shard = store.shard
    assert target.data_ptr() == shard.data_ptr()
    assert shard[: target.numel()].tolist() == [5.0] * target.numel()


def test_adopting_one_parameter_leaves_the_others_alone() -> None:
    case = build("original", SHAPES["divisible"], 2)
    store = case.stores[1]
    before = [target.detach().clone() for target, _ in store.sharded_params]
    store.sharded_params[-1].parameter.data = before[-1] * 2
    store.check("unit 'u'")
    assert torch.equal(store.sharded_params[-1].parameter.detach(), before[-1] * 2)
    assert all(
        torch.equal(target.detach(), old)
        for (target, _), old in zip(store.sharded_params[:-1], before, strict=False)
    )


@pytest.mark.parametrize("kind", ["flat", "original"])
@pytest.mark.parametrize("change", ["dtype", "size"])
def test_data_that_does_not_fit_is_refused_with_the_four_facts(kind: str, change: str) -> None:
    store = build(kind, SHAPES["divisible"], 2).stores[0]
    target = store.sharded_params[0].parameter
    target.data = (
        target.data.double() if change == "dtype" else torch.zeros(math.prod(target.shape) + 1)
    )
    with pytest.raises(StateError) as caught:
        store.check("unit 'blocks.3'")
    text = str(caught.value)
    assert "unit 'blocks.3'" in text
    assert (
        f"expected: {target.numel() if change == 'dtype' else target.numel() - 1} elements of "
        "torch.float32 on cpu" in text
    )
    assert (
        f"got:      {target.numel()} elements of "
        f"{'torch.float64' if change == 'dtype' else 'torch.float32'} on cpu" in text
    )
    assert "to do:" in text


def test_the_refusal_names_the_original_parameter() -> None:
    store = build("original", SHAPES["divisible"], 2).stores[0]
    store.sharded_params[1].parameter.data = torch.zeros(99)
    with pytest.raises(StateError, match="'p1'"):
        store.check("unit 'u'")


@pytest.mark.parametrize("kind", ["flat", "original"])
def test_a_part_of_the_own_data_is_refused(kind: str) -> None:
    """It begins where it should, but the optimizer would step only a part of it."""
    store = build(kind, SHAPES["divisible"], 2).stores[0]
    target = store.sharded_params[0].parameter
    target.data = target.data[:2]
    with pytest.raises(StateError):
        store.check("unit 'u'")


def test_a_whole_parameter_put_in_place_of_an_empty_part_is_refused() -> None:
    store = build("original", SHAPES["small"], 4).stores[3]
    target = next(target for target, _ in store.sharded_params if not target.numel())
    target.data = torch.ones(2)
    with pytest.raises(StateError):
        store.check("unit 'u'")
