"""Frozen parameters of any dtype are kept byte for byte, cost no memory for gradients, and may
become trainable between steps."""

from __future__ import annotations

import copy
import io
import pickle
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp_compat import (
    CPUOffload,
    FullStateDictConfig,
    MixedPrecision,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
    StateError,
)
from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat._comm.transport import Kind
from fsdp_compat._engine.gradients import LARGE
from fsdp_compat.wrap import ModuleWrapPolicy
from tests.support.memory import gradients_nbytes, group_nbytes
from tests.support.models import DIM, Block, Lora, Stack, chain, frozen
from tests.support.pairwise import each_value
from tests.support.parity import both_forms, both_strategies, make_pair, square, wide_vectors
from tests.support.ranks import on_ranks

BF16 = torch.bfloat16
FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID, HYBRID_ZERO2 = ShardingStrategy


# -- bytes


def _patterns(dtype: torch.dtype) -> Tensor:
    """Every bit pattern in an odd shape; for bfloat16 all 65,536, including NaNs with payloads."""
    if dtype is torch.bool:
        return (torch.arange(255) % 3 == 0).view(5, 51)
    bits = torch.arange(2 ** (8 * dtype.itemsize), dtype=torch.int32)
    codes = bits.to(torch.uint8 if dtype.itemsize == 1 else torch.uint16)
    codes = torch.cat([codes, codes[:1], codes[-5:-1]])
    return codes.view(dtype).view(-1, 9 if dtype.itemsize == 1 else 3).clone()


def _bytes(tensor: Tensor) -> bytes:
    # a clone: memory that numpy has seen cannot be freed
    return tensor.detach().clone().view(torch.uint8).numpy().tobytes()


DTYPES = [torch.uint8, torch.int8, torch.int16, torch.bool, torch.bfloat16]
DTYPES += [torch.float8_e4m3fn, torch.float8_e5m2]
VALUES = {f"of_{str(dtype).removeprefix('torch.')}": _patterns(dtype) for dtype in DTYPES}
VALUES["more"] = torch.tensor([250, 251, 252], dtype=torch.uint8)
EXPECTED = {name: _bytes(value) for name, value in VALUES.items()}


class Codes(nn.Module):
    """One frozen parameter of every dtype, two of one dtype, next to trainable ones."""

    def __init__(self, filled: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        for name, value in VALUES.items():
            value = value.clone() if filled else torch.zeros_like(value)
            self.register_parameter(name, nn.Parameter(value, requires_grad=False))
        self.seen: dict[str, bytes] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.seen = _contents(self)
        return self.linear(x).tanh()


def _contents(module: nn.Module) -> dict[str, bytes]:
    """Return the bytes by name; raises if a dtype or a shape differs."""
    found = {name: getattr(module, name) for name in VALUES}
    for name, value in VALUES.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape), name
    return {name: _bytes(value) for name, value in found.items()}


def _assert_all(found: dict[str, bytes], where: str) -> None:
    for name, content in EXPECTED.items():
        assert found[name] == content, f"{name} has changed in {where}"


def _wrap(module: nn.Module, **options: Any) -> FSDP:
    return FSDP(module, auto_wrap_policy=ModuleWrapPolicy({Codes}), **options)


LOW = MixedPrecision(param_dtype=BF16, reduce_dtype=torch.float32, buffer_dtype=BF16)
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "mixed precision": {"mixed_precision": LOW},
    "low gradients": {
        "mixed_precision": MixedPrecision(param_dtype=BF16, keep_low_precision_grads=True)
    },
    "kept": {"sharding_strategy": SHARD_GRAD_OP, "mixed_precision": LOW},
    "replicated": {"sharding_strategy": NO_SHARD},
    "offloaded": {"cpu_offload": CPUOffload(offload_params=True), "mixed_precision": LOW},
}


@each_value
@both_forms
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("num_ranks", [1, 3])
@on_ranks("num_ranks")
def test_frozen_parameters_of_every_dtype_are_gathered_byte_for_byte(
    num_ranks: int, way: str, use_orig_params: bool
) -> None:
    options = {"use_orig_params": use_orig_params, **WAYS[way]}
    torch.manual_seed(0)
    model = _wrap(nn.Sequential(Codes(), Codes()), **options)
    optim = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.1)
    for _ in range(2):
        loss = square(model, torch.ones(2, DIM))
        for unit in model.module:
            _assert_all(unit.module.seen, "forward")
            unit.module.seen = {}
        loss.backward()
        optim.step()
        optim.zero_grad()
    with torch.no_grad():
        model(torch.ones(2, DIM))
    _assert_all(model.module[1].module.seen, "evaluation")
    for writeback in (False, True):
        for to_cpu in (False, True):
            with FSDP.summon_full_params(
                model, writeback=writeback, offload_to_cpu=to_cpu, with_grads=True
            ):
                for unit in model.module:
                    _assert_all(_contents(unit.module), "summon_full_params")
    with FSDP.summon_full_params(model):
        shown = model.module[0].module
        for name in VALUES:
            shown.get_parameter(name).data.view(torch.uint8).zero_()
        shown.of_uint8.data[0, 1] = 7
    model(torch.ones(2, DIM))
    content = model.module[0].module.seen
    assert content["of_uint8"] == bytes([0, 7, *[0] * (len(EXPECTED["of_uint8"]) - 2)])
    assert not any(any(content[name]) for name in VALUES if name != "of_uint8")
    _assert_all(model.module[1].module.seen, "the other unit")


def _through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


@each_value
@both_forms
@pytest.mark.parametrize("precision", [None, LOW])
@pytest.mark.parametrize("num_ranks", [1, 3])
@on_ranks("num_ranks")
def test_state_dicts_preserve_frozen_parameters_byte_for_byte(
    num_ranks: int, precision: MixedPrecision | None, use_orig_params: bool
) -> None:
    options = {"mixed_precision": precision, "use_orig_params": use_orig_params}
    torch.manual_seed(0)
    model = _wrap(nn.Sequential(Codes(), Codes()), **options)
    full, sharded = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT
    for kind, config in (
        (full, FullStateDictConfig()),
        (full, FullStateDictConfig(offload_to_cpu=True)),
        (sharded, ShardedStateDictConfig()),
        (sharded, ShardedStateDictConfig(offload_to_cpu=True)),
    ):
        with FSDP.state_dict_type(model, kind, config):
            state = model.state_dict()
        if kind is full:
            for name, content in EXPECTED.items():
                assert state[f"1.{name}"].dtype == VALUES[name].dtype
                assert _bytes(state[f"1.{name}"]) == content, name
        for form in (use_orig_params, not use_orig_params):
            later = _wrap(
                nn.Sequential(Codes(False), Codes(False)), **{**options, "use_orig_params": form}
            )
            with FSDP.state_dict_type(later, kind, config):
                later.load_state_dict(_through_a_file(state))
            later(torch.ones(2, DIM))
            for unit in later.module:
                _assert_all(unit.module.seen, f"what was loaded from {kind.name}")
    wanted = torch.optim.AdamW(model.parameters())
    square(model, torch.ones(2, DIM)).backward()
    wanted.step()
    state = FSDP.optim_state_dict(model, wanted)["state"]
    assert not set(state) & {f"{index}.{name}" for index in (0, 1) for name in EXPECTED}


@both_forms
@on_ranks(2)
def test_broadcasts_and_copies_keep_every_byte(use_orig_params: bool) -> None:
    torch.manual_seed(0)
    rank = torch.distributed.get_rank()
    model = _wrap(
        nn.Sequential(Codes(rank == 0), Codes(rank == 0)),
        sync_module_states=True,
        use_orig_params=use_orig_params,
    )
    for where, each in (
        ("what rank 0 has given", model),
        ("deepcopy", copy.deepcopy(model)),
        ("pickle", pickle.loads(pickle.dumps(model))),
    ):
        each(torch.ones(2, DIM))
        for unit in each.module:
            _assert_all(unit.module.seen, where)


# -- subclasses of Parameter


class Attributed(nn.Parameter):
    """Copies and pickles keep the class and its attributes, which nn.Parameter's own lose;
    libraries with such parameters bring functions like these."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Attributed:
        attributes = copy.deepcopy(self.__dict__, memo)
        copied = memo[id(self)] = _made(
            type(self), self.data.clone(), self.requires_grad, attributes
        )
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _made, (type(self), self.data.as_subclass(Tensor), self.requires_grad, self.__dict__)


def _made(cls: Any, data: Tensor, requires_grad: bool, attributes: dict[str, Any]) -> Any:
    parameter = torch.Tensor._make_subclass(cls, data, requires_grad)
    parameter.__dict__.update(attributes)
    return parameter


class Packed(Attributed):
    """Bytes that represent weights through an attribute, as in quantization libraries."""

    calls = 0
    scale: float

    def dequantized(self) -> Tensor:
        return (self.as_subclass(Tensor).float() - 128) * self.scale

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            cls.calls += 1
            args = (args[0], args[1].dequantized(), *args[2:])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Tagged(Attributed):
    """A trainable parameter with a method and an attribute."""

    label: str
    last: int

    def squared(self) -> Tensor:
        return self * self


class PackedLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        codes = torch.randint(256, (DIM, DIM), dtype=torch.uint8)
        self.weight: Packed = _made(Packed, codes, False, {"scale": 0.01})
        self.gain: Tagged = _made(Tagged, torch.randn(DIM), True, {"label": "gain"})
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        assert type(self.weight) is Packed and isinstance(self.weight, nn.Parameter)
        assert type(self.gain) is Tagged and self.gain.label == "gain"
        self.weight.num_calls = getattr(self.weight, "num_calls", 0) + 1  # type: ignore[attr-defined]
        self.gain.last = x.shape[0]
        return self.linear(F.linear(x, self.weight) * self.gain.squared()).tanh()


def _rescale(module: nn.Module, args: Any) -> None:
    module.weight.scale = 0.03  # type: ignore[union-attr]


@each_value
@both_forms
@pytest.mark.parametrize(
    ("num_ranks", "options"),
    [
        (1, {}),
        (2, {}),
        (2, {"sharding_strategy": NO_SHARD}),
        (2, {"cpu_offload": CPUOffload(offload_params=True)}),
    ],
)
@on_ranks("num_ranks")
def test_parameter_subclasses_survive_with_attributes_methods_and_functions(
    num_ranks: int, options: dict[str, Any], use_orig_params: bool
) -> None:
    build = partial(chain, PackedLinear, PackedLinear)
    pair = make_pair(build, (PackedLinear,), use_orig_params=use_orig_params, **options)
    first = pair.model.module[0].module
    Packed.calls = 0
    for _ in range(2):
        pair.step()
    assert Packed.calls == 2 * 2 * (1 + pair.ranks), "F.linear passed by the class of its weight"
    pair.step(as_a_user=True)
    with FSDP.summon_full_params(pair.model):  # set on the parameters shown there ...
        assert type(first.weight) is Packed
        assert first.weight.num_calls == 3
        assert first.gain.last == 4
        first.weight.scale = 0.02
    pair.plain[0].weight.scale = 0.02
    pair.step()
    for module in (pair.plain[0], pair.plain[1], first, pair.model.module[1].module):
        module.register_forward_pre_hook(_rescale)  # ... and in forward
    pair.step()
    with FSDP.summon_full_params(pair.model):
        assert first.weight.scale == 0.03
    if use_orig_params:
        assert type(first.weight) is Packed
        assert first.weight.scale == 0.03
        assert isinstance(first.gain, Tagged)
    for other in (copy.deepcopy(pair.model), pickle.loads(pickle.dumps(pair.model))):
        with torch.no_grad():
            assert torch.equal(other(torch.ones(2, DIM)), pair.model(torch.ones(2, DIM)))
        with FSDP.summon_full_params(other):
            inside = other.module[0].module
            assert type(inside.weight) is Packed
            assert inside.weight.scale == 0.03
            assert inside.gain.label == "gain"
            inside.weight.scale = 5.0
        with FSDP.summon_full_params(pair.model):
            assert first.weight.scale == 0.03, "attributes are copied"


@both_forms
@pytest.mark.parametrize("num_ranks", [1, 2])
@on_ranks("num_ranks")
def test_attributes_set_on_the_original_after_wrapping_reach_forward(
    num_ranks: int, use_orig_params: bool
) -> None:
    """Attributes can be set on the parameter object that the user has kept, after wrapping too."""
    module = nn.Sequential(PackedLinear())
    mine = module[0].weight
    mine.scale = 1.0
    model = FSDP(module, use_orig_params=use_orig_params)
    x = torch.ones(1, DIM)
    one = model(x)
    mine.scale = 0.0
    zero = model(x)
    assert not torch.equal(one, zero)
    with FSDP.summon_full_params(model):
        assert torch.equal(zero, module[0].linear.bias.detach().tanh().expand(1, -1))
    assert mine.num_calls == 2


# -- memory for gradients


@both_forms
@on_ranks(2)
def test_gradients_use_memory_and_traffic_for_trainable_elements_only(
    use_orig_params: bool,
) -> None:
    pair = make_pair(partial(chain, Lora, Lora, Lora), (Lora,), use_orig_params=use_orig_params)
    pair.step(batch=wide_vectors)
    groups = pair.model._runtime.groups
    traffic = groups[0].shard.traffic
    traffic.clear()
    x = torch.ones(2, 64)
    with pair.model.no_sync():
        square(pair.model, x).backward()
    assert sum(map(group_nbytes, groups)) == 3 * 256 * 4
    for group in groups:
        if not group.store.sharded_params[0].parameter.requires_grad:
            assert not group.gradients.received and gradients_nbytes(group.gradients) == 0
    square(pair.model, x).backward()
    assert sum(p.grad.nbytes for p in pair.model.parameters() if p.grad is not None) == 3 * 128 * 4
    assert traffic.counts[Kind.REDUCE] == 3
    assert traffic.nbytes[Kind.REDUCE] == 3 * 128 * 4


# -- requires_grad between steps


@each_value
@both_forms
@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP, NO_SHARD])
@pytest.mark.parametrize("width", [DIM, 184])
@on_ranks(2)
def test_requires_grad_change_takes_effect_at_the_next_forward(
    width: int, strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    """Large parameters have hooks of their own."""
    assert width == DIM or 2 * width * width > LARGE
    make = partial(Block, width)
    pair = make_pair(
        partial(chain, make, partial(frozen, make), make),
        use_orig_params=use_orig_params,
        sharding_strategy=strategy,
        batch=lambda generator: torch.randn(4, width, generator=generator),
    )
    units = pair.plain[1], pair.model.module[1]
    group = pair.model._runtime.groups[1]
    axes = (group.shard, group.replica)
    for trainable in (False, True, False, False, True, False, True, True):
        for unit in units:
            unit.requires_grad_(trainable)
        with torch.no_grad():
            pair.model(torch.ones(2, width))
        for axis in axes:
            axis.traffic.clear()
        pair.step()
        num_reductions = sum(
            axis.traffic.counts[Kind.REDUCE] + axis.traffic.counts[Kind.REPLICATE] for axis in axes
        )
        assert num_reductions == (3 if trainable else 2)
        assert all(p.grad is None for p in pair.model.module[1].parameters())  # after zero_grad
    # Toggled after an evaluation, and after a forward whose backward is yet to come.
    with torch.no_grad():
        pair.model(torch.ones(2, width))
    for unit in units:
        unit.requires_grad_(False)
    pair.step()
    losses = [square(model, torch.ones(2, width)) for model in (pair.plain, pair.model)]
    for unit in units:
        unit.requires_grad_(True)
    for loss in losses:
        loss.backward()
    pair.compare_and_update()
    pair.step()


@both_strategies
@on_ranks(2)
def test_requires_grad_may_be_toggled_with_original_parameters(strategy: ShardingStrategy) -> None:
    pair = make_pair(Stack, use_orig_params=True, sharding_strategy=strategy)
    pair.step()
    for trainable in (False, False, True, True):
        for model in (pair.plain, pair.model):
            model.blocks[1].up.weight.requires_grad_(trainable)
            for p in model.blocks[2].parameters():
                p.requires_grad_(trainable)
        with torch.no_grad():
            pair.model(torch.randn(2, DIM))
        pair.step()


@on_ranks(2)
def test_freezing_some_of_a_flat_parameter_raises_and_whole_units_follow() -> None:
    pair = make_pair(Stack)
    block, inner = pair.model.module.blocks[0], pair.model.module.blocks[0].module.up

    def assigns() -> None:
        inner.weight.requires_grad = False

    def in_summon() -> None:
        with FSDP.summon_full_params(pair.model):
            inner.requires_grad_(False)

    for freeze in (partial(inner.requires_grad_, False), assigns, in_summon):
        with pytest.raises(StateError, match="use_orig_params=True"):
            freeze()
    inner.requires_grad_(True)  # as it is
    assert all(p.requires_grad for p in pair.model.parameters())
    block.requires_grad_(False)
    pair.plain.blocks[0].requires_grad_(False)
    pair.step()
    with FSDP.summon_full_params(pair.model):
        block.requires_grad_(True)
        pair.model.module.blocks[1].requires_grad_(False)
    pair.plain.blocks[0].requires_grad_(True)
    pair.plain.blocks[1].requires_grad_(False)
    pair.step()


@on_ranks(2)
def test_freezing_between_accumulated_backwards_keeps_other_gradients() -> None:
    """They are still reduced, as they would stay in ``.grad`` without sharding."""
    pair = make_pair(Stack, use_orig_params=True)
    with pair.model.no_sync():
        pair.backwards()
    for model in (pair.plain, pair.model):
        model.head.requires_grad_(False)
    pair.plain.head.zero_grad()
    pair.step()
