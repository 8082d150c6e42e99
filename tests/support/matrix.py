"""One training run with any combination of settings, a Case, beside the unsharded model that
computes in the same dtypes.

The unsharded model takes every rank's batch in turn. In mixed precision it computes with a copy of
itself in ``param_dtype`` (and buffers in ``buffer_dtype``), adds up the gradients of backwards
under no_sync in ``reduce_dtype``, and sums over the ranks, divides and keeps in its own dtype.
These are the roundings of the sharded model in the same order, but in a 16-bit ``reduce_dtype`` a
communication hook of torch sums in it, and replicas send their sums in it."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import random
import typing
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    CheckpointWrapper,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fsdp_compat
from fsdp_compat._state.units import clean_name
from tests.support.beside_torch import recorded
from tests.support.models import Layer, RecomputesBlocks, Shifted, Stack
from tests.support.parity import Pair, assert_close, vectors

FP64, FP32, FP16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
MAX_NORM = 0.05  # below every norm, so that clipping always scales


class Dtypes(typing.NamedTuple):
    """A precision, and the tolerance against the unsharded model, relative to the largest element
    of a tensor."""

    shard: torch.dtype
    settings: dict[str, torch.dtype]
    tolerance: float

    @property
    def compute(self) -> torch.dtype:
        return self.settings.get("param_dtype", self.shard)

    @property
    def reduce(self) -> torch.dtype:
        return self.settings.get("reduce_dtype", self.compute)


PRECISIONS = {
    "fp32": Dtypes(FP32, {}, 1e-6),
    "fp64": Dtypes(FP64, {}, 1e-12),
    "buffers": Dtypes(FP32, {"buffer_dtype": BF16}, 1e-6),
    "bf16+fp32": Dtypes(FP32, {"param_dtype": BF16, "reduce_dtype": FP32}, 1e-6),
    "bf16": Dtypes(FP32, {"param_dtype": BF16}, 1e-6),
    "fp16+fp32": Dtypes(
        FP32, {"param_dtype": FP16, "reduce_dtype": FP32, "buffer_dtype": FP16}, 1e-6
    ),
}
# A sum that is sent in bf16 is rounded at every addition (three, of four ranks) and at the division
# before and after it: less than four roundings of 2^-9 in all, of partial sums that are not larger
# than the sum of magnitudes. A lost rank is 2^-2 and more.
SENT_IN_BF16 = 2**-6

FIELDS: dict[str, Sequence[Any]] = {
    "strategy": ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"],
    "mesh": [(2, 2), (1, 4), (4, 1)],  # (replicas, shards), of the hybrid strategies on four ranks
    "use_orig_params": [False, True],
    "precision": list(PRECISIONS),
    "offload": [False, True],
    "backwards": ["s", "ss", "nns", "sns"],  # n: under no_sync
    "checkpoint": [
        "",
        "inside",
        "inside reentrant",
        "outside",
        "outside reentrant",
        "function",
        "function reentrant",
    ],
    "frozen": ["", "some", "unit", "toggled"],
    "wrapping": ["root", "policy", "nested", "by hand"],
    "clip": ["", "2", "inf", "2 by torch"],
    "prefetch": ["PRE", "PRE forward", "POST", "POST forward", "NONE", "NONE forward"],
    "limit_all_gathers": [True, False],
    "comm_hook": [False, True],
    "optimizer": ["SGD", "AdamW"],
    "evaluates": [False, True],  # between the steps
}


@dataclasses.dataclass(frozen=True, repr=False)
class Case:
    """Settings of one run. The values are in FIELDS."""

    strategy: str = "FULL_SHARD"
    mesh: tuple[int, int] = (2, 2)
    use_orig_params: bool = False
    precision: str = "fp32"
    offload: bool = False
    backwards: str = "s"
    checkpoint: str = ""
    frozen: str = ""
    wrapping: str = "policy"
    clip: str = ""
    prefetch: str = "PRE"
    limit_all_gathers: bool = True
    comm_hook: bool = False
    optimizer: str = "SGD"
    evaluates: bool = False

    def __post_init__(self) -> None:
        for name, values in FIELDS.items():
            assert getattr(self, name) in values, (
                f"{name}={getattr(self, name)!r} is not one of {values}"
            )

    def __repr__(self) -> str:
        given = [
            (field.name, getattr(self, field.name), field.default)
            for field in dataclasses.fields(self)
        ]
        changed = [f"{name}={value!r}" for name, value, default in given if value != default]
        return f"Case({', '.join(changed)})"

    @property
    def dtypes(self) -> Dtypes:
        return PRECISIONS[self.precision]

    @property
    def is_hybrid(self) -> bool:
        return "HYBRID" in self.strategy

    @property
    def num_steps(self) -> int:
        """The third step freezes again what the second one has trained."""
        return 3 if self.frozen == "toggled" else 2

    @property
    def reentrant(self) -> bool:
        return self.checkpoint.endswith("reentrant")


def draw_cases(rng: random.Random, num: int, **fields: Sequence[Any]) -> list[Case]:
    """Return ``num`` cases in which every value of a field occurs equally often, in random
    combinations.

    fields: values to use instead of those in FIELDS.
    """
    columns = {}
    for name, values in (FIELDS | fields).items():
        shuffled = rng.sample(list(values), len(values))
        columns[name] = rng.sample([shuffled[index % len(values)] for index in range(num)], num)
    return [
        _possible(Case(**dict(zip(columns, row, strict=True))))
        for row in zip(*columns.values(), strict=True)
    ]


def _possible(case: Case) -> Case:
    """Change a case that is impossible: a FlatParameter is trainable or frozen as a whole."""
    if case.frozen == "toggled" and case.wrapping == "root" and not case.use_orig_params:
        return dataclasses.replace(case, frozen="unit")
    return case


def run_cases(cases: Sequence[Case]) -> None:
    """Collective. Train with the settings of each case; raises AssertionError, which names the
    case, for the first to fail."""
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # reentrant checkpoints and torch's hooks use deprecated calls
        wanted = sorted({case.mesh for case in cases if case.is_hybrid})
        meshes = {shape: init_device_mesh("cpu", shape) for shape in wanted}
        for case in cases:
            try:
                _run(case, meshes.get(case.mesh) if case.is_hybrid else None)
            except Exception as error:
                raise AssertionError(f"{case} on {dist.get_world_size()} ranks: {error}") from error


def _run(case: Case, mesh: DeviceMesh | None) -> None:
    pair = _make_pair(case, mesh)
    exact = case.dtypes.tolerance
    replicas = {"NO_SHARD": pair.ranks}.get(case.strategy, case.mesh[0] if case.is_hybrid else 1)
    rounded = (
        case.dtypes.reduce.itemsize == 2 and (replicas > 1 or case.comm_hook) and pair.ranks > 1
    )
    for step in range(case.num_steps):
        if case.frozen == "toggled":
            _freeze(case, pair, step != 1)
        if (
            case.dtypes.compute.itemsize == 2
        ):  # where the last bit of a weight may decide how it is rounded
            pair.copy_parameters()
        _compare_losses(case, pair)
        if rounded:
            pair.tolerance = SENT_IN_BF16
            pair.compare_gradients()
            pair.copy_gradients()
        pair.tolerance = exact
        _compare_norms(case, pair)
        pair.compare_and_update()
        if case.evaluates:
            _compare_outputs(case, pair)
    pair.assert_state_equal()  # buffers with the values that the user gave them


# -- the two models


def _make_pair(case: Case, mesh: DeviceMesh | None) -> Pair:
    plain = _build(case, recomputes=False)
    pair = Pair(plain, wrapped(case, mesh))
    pair.plain_optim, pair.optim = (_optimizer(case, each) for each in (plain, pair.model))
    return pair


def _build(case: Case, recomputes: bool) -> nn.Module:
    torch.manual_seed(0)
    model = RecomputesBlocks(Layer, case.reentrant, 1, 3) if recomputes else Stack(3, Layer)
    for name, p in model.named_parameters():
        p.requires_grad_(not _is_frozen(case, name))
    return model.to(case.dtypes.shard)


def wrapped(case: Case, mesh: DeviceMesh | None, library: Any = fsdp_compat) -> Any:
    """Return the sharded model. Collective. library: fsdp_compat, or torch.distributed.fsdp."""
    model = _build(case, recomputes=case.checkpoint.startswith("function"))
    wrap = functools.partial(checkpoint_wrapper, checkpoint_impl=_kind(case))
    if case.checkpoint.startswith("inside"):
        apply_activation_checkpointing(
            model, checkpoint_wrapper_fn=wrap, check_fn=lambda m: isinstance(m, Layer)
        )
    sharded = _shard(case, model, mesh, library)
    if case.checkpoint.startswith("outside"):
        apply_activation_checkpointing(
            sharded, checkpoint_wrapper_fn=wrap, check_fn=functools.partial(_is_layer, case)
        )
    return sharded


def _is_layer(case: Case, module: nn.Module) -> bool:
    """True for a layer, or the wrapper of one."""
    inner = module if case.wrapping == "root" else getattr(module, "_fsdp_wrapped_module", None)
    return isinstance(inner, Layer)


def _kind(case: Case) -> CheckpointImpl:
    return CheckpointImpl.REENTRANT if case.reentrant else CheckpointImpl.NO_REENTRANT


def _is_frozen(case: Case, name: str) -> bool:
    if case.frozen == "some":
        return name.startswith("blocks") and ("linear.weight" in name or "norm.bias" in name)
    return case.frozen in ("unit", "toggled") and name.startswith("blocks.1.")


def _freeze(case: Case, pair: Pair, frozen: bool) -> None:
    """Freeze or unfreeze a whole unit; with use_orig_params=True also a part of one."""
    some = ("blocks.0.inner.up.weight", "blocks.2.linear.bias") if case.use_orig_params else ()
    for model in (pair.plain, pair.model):
        for name, p in model.named_parameters():
            if clean_name(name).startswith(("blocks.1.", *some)):
                p.requires_grad_(not frozen)


def _shard(
    case: Case, model: nn.Module, mesh: DeviceMesh | None, library: Any = fsdp_compat
) -> Any:
    backward_prefetch, _, forward = case.prefetch.partition(" ")
    options: dict[str, Any] = {
        "sharding_strategy": library.ShardingStrategy[case.strategy],
        "device_mesh": mesh,
        "use_orig_params": case.use_orig_params,
        "mixed_precision": library.MixedPrecision(**case.dtypes.settings)
        if case.dtypes.settings
        else None,
        "cpu_offload": library.CPUOffload(case.offload),
        "device_id": torch.device("cpu"),  # torch's FSDP requires it
        "backward_prefetch": None
        if backward_prefetch == "NONE"
        else library.BackwardPrefetch[f"BACKWARD_{backward_prefetch}"],
        "forward_prefetch": bool(forward),
        "limit_all_gathers": case.limit_all_gathers,
    }
    outer = CheckpointWrapper if case.checkpoint.startswith("inside") else Layer
    classes: dict[str, tuple[type[nn.Module], ...]] = {
        "policy": (outer,),
        "nested": (outer, Shifted),
    }
    wrapped = library.FullyShardedDataParallel
    if case.wrapping == "by hand":
        model.blocks = nn.ModuleList(
            wrapped(block, **options) for block in typing.cast(Any, model.blocks)
        )
        model.stem = wrapped(typing.cast(Any, model.stem), **options)
    policy = (
        library.wrap.ModuleWrapPolicy(classes[case.wrapping]) if case.wrapping in classes else None
    )
    sharded = wrapped(model, auto_wrap_policy=policy, **options)
    if case.comm_hook:
        splits = sharded._runtime.groups[0].shard.ranks > 1
        group = mesh.get_group(0) if mesh is not None and not splits else sharded.process_group
        hook = default_hooks.reduce_scatter_hook if splits else default_hooks.allreduce_hook
        sharded.register_comm_hook(default_hooks.DefaultState(group), hook)
    return sharded


def _optimizer(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    if case.optimizer == "SGD":
        return torch.optim.SGD(model.parameters(), 0.02, momentum=0.9)
    # With the usual eps, a gradient that is only rounding error would give a full-size update.
    return torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-2)


# -- one step


def _loss(case: Case, model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    return (out.float() if out.dtype.itemsize == 2 else out).pow(2).mean()


def _compare_losses(case: Case, pair: Pair) -> None:
    """Do the backwards of one step in both models, and compare the losses. Collective."""
    batches = [x.to(case.dtypes.shard) for x in pair.batches(vectors)]
    expected = _plain_backwards(case, pair.plain, batches)[pair.rank]
    for index, letter in enumerate(case.backwards):
        with pair.model.no_sync() if letter == "n" else contextlib.nullcontext():
            loss = _loss(case, pair.model, batches[pair.rank] * (1 + index / 4))
            loss.backward()
        assert_close(loss, expected[index], f"loss of backward {index}", case.dtypes.tolerance)


def _plain_backwards(case: Case, plain: nn.Module, batches: Sequence[Tensor]) -> list[list[Tensor]]:
    """Add up the average over the batches of all ranks in ``.grad``; return their losses, by
    rank."""
    losses: list[list[Tensor]] = [[] for _ in batches]
    sent: list[list[list[Tensor | None]]] = []  # by rank, by synchronised backward, by parameter
    for rank, x in enumerate(batches):
        low = _in_compute_dtypes(case, plain)
        sent.append([])
        collected: list[Tensor | None] = [None for _ in low.parameters()]
        for index, letter in enumerate(case.backwards):
            loss = _loss(case, low, (x * (1 + index / 4)).to(case.dtypes.compute))
            loss.backward()
            losses[rank].append(loss.detach())
            for place, p in enumerate(low.parameters()):
                if p.grad is not None:
                    grad, before = p.grad.to(case.dtypes.reduce), collected[place]
                    collected[place] = grad if before is None else before + grad
                    p.grad = None
            if letter == "s":
                sent[rank].append(collected)
                collected = [None] * len(collected)
    for of_ranks in zip(*sent, strict=True):
        for p, grads in zip(plain.parameters(), zip(*of_ranks, strict=True), strict=True):
            there = [grad.to(p.dtype) for grad in grads if grad is not None]
            if there:
                average = functools.reduce(torch.add, there) / len(batches)
                p.grad = average if p.grad is None else p.grad + average
    return losses


_deep_copy = functools.lru_cache(maxsize=1)(copy.deepcopy)  # which takes long


def _in_compute_dtypes(case: Case, plain: nn.Module) -> nn.Module:
    """Return the copy of ``plain``, with its present values."""
    low = _deep_copy(plain).train(plain.training)
    for p, mine in zip(plain.parameters(), low.parameters(), strict=True):
        mine.requires_grad_(p.requires_grad)
        mine.grad, mine.data = None, p.data.to(case.dtypes.compute, copy=True)
    for module, its in zip(plain.modules(), low.modules(), strict=True):
        for name, buffer in module.named_buffers(recurse=False):
            dtype = case.dtypes.settings.get("buffer_dtype", buffer.dtype)
            setattr(its, name, buffer.to(dtype, copy=True))
    return low


def values_of_training(case: Case, library: Any) -> dict[str, Tensor]:
    """Train with ``library``; return what this rank sees in each step. Collective."""
    model = wrapped(case, None, library)
    # backwards with sync before the last one come without an update
    *earlier, last = case.backwards
    pattern = "".join(earlier).replace("s", "a") + last
    return recorded(library, model, _optimizer(case, model), pattern * case.num_steps)


def _compare_norms(case: Case, pair: Pair) -> None:
    """Clip both, and compare the norms. Collective."""
    if case.clip:
        norm_type = float(case.clip.split()[0])
        expected = torch.nn.utils.clip_grad_norm_(pair.plain.parameters(), MAX_NORM, norm_type)
        assert expected > MAX_NORM
        if case.clip.endswith("torch"):
            norm = torch.nn.utils.clip_grad_norm_(pair.model.parameters(), MAX_NORM, norm_type)
        else:
            norm = pair.model.clip_grad_norm_(MAX_NORM, norm_type)
        assert_close(norm, expected, "norm", case.dtypes.tolerance)


@torch.no_grad()
def _compare_outputs(case: Case, pair: Pair) -> None:
    """Collective."""
    x = pair.batches(vectors)[pair.rank].to(case.dtypes.shard)
    if case.dtypes.compute.itemsize == 2:
        pair.copy_parameters()
    pair.plain.eval()
    pair.model.eval()
    expected = _in_compute_dtypes(case, pair.plain)(x.to(case.dtypes.compute))
    assert_close(pair.model(x), expected, "output in evaluation", case.dtypes.tolerance)
    pair.model.train()
    pair.plain.train()
