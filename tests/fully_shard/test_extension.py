"""Tensors that pack themselves before an all-gather and unpack themselves after it: weights that
travel as int8 give the results of the dequantised model, and send a quarter of the bytes."""

from __future__ import annotations

import functools
import types
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from tests.support.fully_sharded import Gathers, is_sharded, pair_of, partial_shard, shard_all
from tests.support.models import DIM, Block
from tests.support.parity import assert_same_values, whole_gradients
from tests.support.ranks import on_ranks
from tests.support.same_host import mapped_or_sent

ROWS = 16
BF16 = torch.bfloat16


class Packed(torch.Tensor):
    """A weight that travels as int8: frozen codes with one scale, or trainable floating-point
    values, which are sent as codes with a scale per row."""

    @staticmethod
    def __new__(cls, inner: Tensor, dtype: torch.dtype, scale: float | None = None) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), dtype=dtype, device=inner.device
        )

    def __init__(self, inner: Tensor, dtype: torch.dtype, scale: float | None = None) -> None:
        self.inner, self.scale = inner, scale

    def like(self, inner: Tensor) -> Packed:
        return Packed(inner, inner.dtype if self.scale is None else self.dtype, self.scale)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Packed({self.inner})"

    __format__ = object.__format__

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        """Operations work on the inner tensor; those that keep the type wrap what they return."""
        found: list[Packed] = []

        def unwrapped(value: Packed) -> Tensor:
            found.append(value)
            return value.inner

        args, kwargs = tree_map_only(Packed, unwrapped, (args, kwargs or {}))
        out = func(*args, **kwargs)
        if func is torch.ops.aten.copy_.default or func.__name__.split(".")[0].endswith("_"):
            return found[0]
        own = found[0].inner.dtype
        return tree_map_only(Tensor, lambda t: found[0].like(t) if t.dtype == own else t, out)

    def __tensor_flatten__(self) -> Any:
        return ["inner"], (self.dtype, self.scale)

    @staticmethod
    def __tensor_unflatten__(inner: Any, meta: Any, size: Any, stride: Any) -> Packed:
        return Packed(inner["inner"], *meta)

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        assert isinstance(module, nn.Module) and mesh.size() >= 1 and len(outer_size) == 2
        return _quantised(self.inner) if self.scale is None else (self.inner,), self.scale

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        codes, *scales = outputs
        whole = codes.to(param_dtype) * (scales[0] if metadata is None else metadata)
        return (whole, (whole,)) if out is None else _fill(out, whole)


def _fill(out: Tensor, value: Tensor) -> None:
    """Unpacking again is no change, for autograd. ``value`` may have padding at its end."""
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
        out.copy_(value[: len(out)])


def _quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 codes of the weight's shape and float32 scales per row, (rows, 1)."""
    scales = weight.abs().amax(1, keepdim=True) / 127 + 1e-12
    return (weight / scales).round().to(torch.int8), scales


class Straight(torch.autograd.Function):
    """Rounds to what travels; gradients pass as they are."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        codes, scales = _quantised(weight)
        return codes.to(weight.dtype) * scales

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


class Quantised(nn.Module):
    """A linear layer whose weight travels as int8; unsharded, it computes with the same values."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        weight = torch.randn(ROWS, DIM)
        if kind == "frozen":  # what one scale of int8 can express
            weight = (weight * 16).round().clamp(-127, 127) / 16
        self.weight = nn.Parameter(weight, requires_grad=kind != "frozen")
        self.bias = nn.Parameter(torch.randn(ROWS))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if self.kind == "trained" and not self.is_packed:
            weight = Straight.apply(weight)
        return F.linear(x, weight, self.bias)[..., :DIM] + x

    is_packed = False


def _build(kind: str) -> nn.Module:
    return nn.Sequential(Quantised(kind), Block(), Quantised(kind))


def _shard(model: Any, **options: Any) -> Any:
    for module in model:
        if isinstance(module, Quantised):
            data, trained = module.weight.detach(), module.kind == "trained"
            codes = (data if trained else data * 16).to(data.dtype if trained else torch.int8)
            packed = Packed(codes, data.dtype, None if trained else 1 / 16)
            module.weight = nn.Parameter(packed, requires_grad=trained)
            module.is_packed = True
    return partial_shard(classes=(Quantised, Block), **options)(model)


@pytest.mark.parametrize(("ranks", "reshard_after_forward"), [(2, None), (3, False)], ids=str)
@pytest.mark.parametrize("kind", ["frozen", "trained"])
@on_ranks("ranks")
def test_weights_that_travel_as_int8_train_as_the_dequantised_model(
    kind: str, ranks: int, reshard_after_forward: bool | None
) -> None:
    """On three ranks the last parts are smaller. The bytes sent are counted on two."""
    shard = functools.partial(_shard, reshard_after_forward=reshard_after_forward)
    pair = pair_of(functools.partial(_build, kind), shard, optimizer=_sgd)
    first = pair.model[0]
    assert isinstance(first.weight, DTensor)
    assert isinstance(first.weight.to_local(), Packed)
    gathers = Gathers(pair.model) if ranks == 2 else None
    for _ in range(2):
        pair.backwards()  # no comparison reads a packed parameter as a whole
        gradients = [whole_gradients(model) for model in (pair.model, pair.plain)]
        assert_same_values(*gradients, "gradient")
        for optim in (pair.plain_optim, pair.optim):
            optim.step()
            optim.zero_grad()
        assert is_sharded(pair.model[1].up)
        if gathers is not None:
            sizes = [call["nbytes"] for call in gathers.calls_of("0")]
            num_unshards = len(sizes) // len(set(sizes))  # of weight and bias, apart or together
            rows = ROWS // 2
            wanted = rows * DIM + rows * 4 + (rows * 4 if kind == "trained" else 0)
            assert wanted <= sum(sizes) / num_unshards <= wanted + 32, (sizes, wanted)
    first.unshard()
    assert type(first.weight) is nn.Parameter


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in parameters if p.requires_grad], 0.05, foreach=False)


def _before(self: Tensor, mesh: Any, outer_size: Any, *more: Any, pads: bool = True) -> Any:
    """Send bf16, padded to the rows of the first rank."""
    padding = -(-outer_size[0] // mesh.size()) - len(self) if pads else 0
    return (F.pad(self.detach(), (0, 0, 0, padding)).to(BF16),), None


def _after(
    self: Tensor, outputs: Any, metadata: None, param_dtype: torch.dtype, *, out: Any = None
) -> Any:
    (sent,) = outputs
    assert sent.dtype is BF16
    if out is not None:
        return _fill(out, sent)
    whole = sent.to(param_dtype)
    return whole, (sent, whole)


def _shard_patched(begins_on_meta: bool, before: Any, model: Any) -> Any:
    values = {name: value.clone() for name, value in model.state_dict().items()}
    if begins_on_meta:
        model.to("meta")
    shard_all(model, ())
    if begins_on_meta:
        model.to_empty(device="cpu")
        set_model_state_dict(model, values, options=StateDictOptions(full_state_dict=True))
    for parameter in model.parameters():
        if parameter.dim() == 2:
            local = parameter._local_tensor
            local.fsdp_pre_all_gather = types.MethodType(before, local)
            local.fsdp_post_all_gather = types.MethodType(_after, local)
    return model


def _rounded() -> nn.Module:
    """Weights are what bf16 can express. The last one is uneven on two ranks."""
    model = nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU(), nn.Linear(DIM, 5))
    for parameter in model.parameters():
        parameter.data = parameter.data.to(BF16).float()
    return model


@mapped_or_sent
@pytest.mark.parametrize("begins_on_meta", [False, True])
@on_ranks(2)
def test_methods_set_on_local_tensors_are_called(
    begins_on_meta: bool, environment: dict[str, str]
) -> None:
    pair = pair_of(_rounded, functools.partial(_shard_patched, begins_on_meta, _before))
    pair.step()  # weights have more digits now
    for parameter in pair.plain.parameters():
        if parameter.dim() == 2:
            parameter.data = parameter.data.to(BF16).float()
    pair.compare_outputs()


@on_ranks(2)
def test_a_method_that_does_not_pad_is_refused_on_the_ranks_that_need_it() -> None:
    model = _shard_patched(False, functools.partial(_before, pads=False), _rounded())
    if dist.get_rank() == 1:  # which has two rows of five
        with pytest.raises(AssertionError, match="without padding"):
            model(torch.ones(1, DIM))
