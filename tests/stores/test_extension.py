"""Tensor subclasses with fsdp_pre_all_gather: all ranks of a group are simulated in one process."""

from __future__ import annotations

import typing
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from fsdp_compat._engine.storage import GroupMemory
from fsdp_compat._stores.extension import Context, ExtensionStore
from fsdp_compat._stores.placement import RowPlacement
from fsdp_compat.errors import StateError, TypeUsageError, UsageError
from tests.support.engine_build import CPU, members_of
from tests.support.memory import gathered_nbytes


class Weight(torch.Tensor):
    """Values in full precision that travel as int8, with a scale per row and the number of ranks
    that sent them as metadata."""

    calls: typing.ClassVar[list[str]] = []

    @staticmethod
    def __new__(cls, values: torch.Tensor, **_: Any) -> Weight:
        self: Any = torch.Tensor._make_wrapper_subclass(
            cls, values.shape, dtype=values.dtype, device=values.device
        )
        self.values = values
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        values = pytree.tree_map_only(Weight, lambda w: w.values, (args, kwargs or {}))
        result = func(*values[0], **values[1])
        if func is torch.ops.aten.copy_.default:
            return args[0]
        return pytree.tree_map_only(torch.Tensor, cls, result)

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        assert tuple(outer_stride) == tuple(torch.empty(outer_size, device="meta").stride())
        self.calls.append(f"{mesh} {tuple(outer_size)} {type(module).__name__} {mp_policy}")
        return _quantised(self.values), "metadata"

    def fsdp_post_all_gather(
        self,
        outputs: tuple[torch.Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        assert metadata == "metadata"
        value = (outputs[0].float() * outputs[1]).to(param_dtype)
        if out is None:
            return value, (value,)
        out.copy_(value[: len(out)])  # without the padding of the last ranks
        return None


class OldWeight(Weight):
    """The signature of earlier versions."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:  # type: ignore[override]
        self.calls.append(f"old {mesh}")
        return _quantised(self.values), "metadata"


class OneMethod(Weight):
    fsdp_post_all_gather: Any = property()  # an AttributeError


class Changing(Weight):
    size = 1

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:  # type: ignore[override]
        return (torch.zeros(self.size),), "metadata"

    def fsdp_post_all_gather(self, *_: Any, out: Any = None, **__: Any) -> Any:
        value = self.values.new_zeros(4, 2)
        return value, (value,)


def _quantised(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = values.abs().amax(1, keepdim=True) / 127
    return (values / scale).round().to(torch.int8), scale


def _dequantised(values: torch.Tensor) -> torch.Tensor:
    numbers, scale = _quantised(values)
    return numbers.float() * scale


class Model(nn.Module):
    def __init__(self, cls: type[Weight] = Weight) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Parameter(cls(torch.randn(4, 3)))
        self.down = nn.Parameter(cls(torch.randn(8, 5)))
        self.up.note = "mine"


def _of(weight: torch.Tensor) -> nn.Module:
    model = nn.Module()
    model.weight = nn.Parameter(weight)
    return model


def _stores(
    model: nn.Module, ranks: int, dtype: torch.dtype | None = None, dim: int | None = 0
) -> list[ExtensionStore]:
    context = Context("mesh", "policy", CPU, dtype)
    placements = [RowPlacement(dim) for _ in model.parameters()]
    return [
        ExtensionStore(
            members_of(model), placements, rank=rank, ranks=ranks, device=CPU, context=context
        )
        for rank in range(ranks)
    ]


def _gather(stores: list[ExtensionStore], memory: GroupMemory) -> None:
    for store in stores:
        assert store.has_extension
        store.pack()
    memory.allocate()
    memory.all_gather_output.copy_(torch.cat([store.shard for store in stores]))
    memory.fill_unsharded_params()


@pytest.mark.parametrize(
    ("cls", "first_call"), [(Weight, "mesh (4, 3) Model policy"), (OldWeight, "old mesh")]
)
@pytest.mark.parametrize("ranks", [1, 7])
def test_what_the_subclass_sends_becomes_the_unsharded_parameter_in_the_dtype_of_the_policy(
    ranks: int, cls: type[Weight], first_call: str
) -> None:
    model = Model(cls)
    values = [parameter.values.clone() for parameter in model.parameters()]
    Weight.calls.clear()
    stores = _stores(model, ranks, torch.float64)
    assert Weight.calls[0] == first_call
    memory = GroupMemory(stores[0], ranks, torch.uint8, CPU)
    for scale in (1.0, 3.0):
        with torch.no_grad():
            for store in stores:
                for local, _ in store.sharded_params:
                    assert isinstance(local, cls)
                    local.mul_(scale)
        _gather(stores, memory)
        for value, param in zip(values, memory.unsharded_params, strict=True):
            value.mul_(scale)
            assert torch.equal(param, _dequantised(value).double())
            assert type(param) is nn.Parameter
            assert param._version == 0
        memory.free()
        assert gathered_nbytes(memory) == 0
    assert memory.unsharded_params[0].note == "mine"
    assert stores[0].reduce_form().dtype == torch.float32


# -- what is refused


@pytest.mark.parametrize(("shape", "dim"), [((0, 2), 0), ((), None), ((2, 3), 1)])
def test_parameters_that_cannot_be_padded_are_refused(
    shape: tuple[int, ...], dim: int | None
) -> None:
    with pytest.raises(UsageError, match="cannot be cut like this"):
        _stores(_of(Weight(torch.ones(shape))), 2, dim=dim)


def test_other_sizes_than_before_and_of_an_unsharded_parameter_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    [store, _] = _stores(_of(Changing(torch.ones(4, 2))), 2)
    assert store.has_extension
    monkeypatch.setattr(Changing, "size", 2)
    with pytest.raises(StateError, match="different tensors than before"):
        store.pack()
    [store, _] = _stores(_of(Changing(torch.ones(8, 2))), 2)
    with pytest.raises(TypeUsageError, match="fsdp_post_all_gather"):
        GroupMemory(store, 2, torch.uint8, CPU)


def test_checkpoints_of_sections_and_partial_gathers_are_refused() -> None:
    [store] = _stores(Model(), 1)
    with pytest.raises(UsageError, match="fsdp_pre_all_gather"):
        _ = store.sections
    with pytest.raises(UsageError, match="reshard_after_forward"):
        store.partial_rows(None, 0, 2, [])


def test_a_subclass_with_one_of_the_methods_is_refused() -> None:
    with pytest.raises(UsageError, match="fsdp_post_all_gather"):
        _stores(Model(OneMethod), 2)
