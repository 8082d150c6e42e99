"""One training run with any combination of settings, a Case, of either front end: beside the
unsharded model that computes in the same dtypes, or beside torch's.

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
import typing
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    CheckpointWrapper,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from fsdp_compat.optim import ShardBlocks
from tests.support.beside_torch import recorded
from tests.support.fully_sharded import OURS, Library
from tests.support.models import DIM, Layer, RecomputesBlocks, Shifted, Stack
from tests.support.parity import (
    Pair,
    assert_close,
    local,
    no_sync,
    plain_name,
    reshard,
    vectors,
    whole,
)

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
    "bf16+fp32": Dtypes(FP32, {"param_dtype": BF16, "reduce_dtype": FP32}, 1e-6),
    "bf16": Dtypes(FP32, {"param_dtype": BF16}, 1e-6),
    "buffers": Dtypes(FP32, {"buffer_dtype": BF16}, 1e-6),
    "fp16+fp32": Dtypes(
        FP32, {"param_dtype": FP16, "reduce_dtype": FP32, "buffer_dtype": FP16}, 1e-6
    ),
    "fp32+bf16": Dtypes(FP32, {"reduce_dtype": BF16}, 1e-6),
    "output": Dtypes(FP32, {"param_dtype": BF16, "reduce_dtype": FP32, "output_dtype": FP32}, 1e-6),
}
# A sum that is sent in bf16 is rounded at every addition (three, of four ranks) and at the division
# before and after it: less than four roundings of 2^-9 in all, of partial sums that are not larger
# than the sum of magnitudes. A lost rank is 2^-2 and more.
SENT_IN_BF16 = 2**-6

# Elements that stay together.
BLOCKS: dict[str, Callable[[str, nn.Parameter], int]] = {
    "7": lambda name, p: 7,
    "rows": lambda name, p: max(p[0].numel() if p.dim() > 1 else 1, 1),
    "whole": lambda name, p: max(p.numel(), 1),
}
FULL_SHARD, FULLY_SHARD = "FULL_SHARD", "fully_shard"
CHECKPOINTS = [
    "",
    *(f"{p}{kind}" for p in ("inside", "outside", "function") for kind in ("", " reentrant")),
]

# Of either front end; then what each has beside.
FIELDS: dict[str, Sequence[Any]] = {
    "strategy": [FULL_SHARD, "SHARD_GRAD_OP", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"],
    "mesh": [(2, 2), (1, 4), (4, 1)],  # (replicas, shards), of the hybrid strategies on four ranks
    "precision": ["fp32", "fp64", "bf16+fp32", "bf16"],
    "offload": [False, True],
    "backwards": ["s", "ss", "nns", "sns"],  # see ``_backward_of``
    "checkpoint": CHECKPOINTS,
    "frozen": ["", "some", "unit", "toggled"],
    "wrapping": ["root", "policy", "nested", "by hand"],
    "clip": ["", "2 by torch"],
    "optimizer": ["SGD", "AdamW"],
    "evaluates": [False, True],  # between the steps
}
FLAT_FIELDS: dict[str, Sequence[Any]] = FIELDS | {
    "front_end": ["flat", "original"],
    "strategy": [*FIELDS["strategy"], "NO_SHARD"],
    "precision": [*FIELDS["precision"], "buffers", "fp16+fp32"],
    "clip": ["", "2", "inf", "2 by torch"],
    "prefetch": ["PRE", "PRE forward", "POST", "POST forward", "NONE", "NONE forward"],
    "limit_all_gathers": [True, False],
    "comm_hook": [False, True],
    "blocks": ["", "7", "rows", "whole"],  # of the shards, see BLOCKS
}
ROW_FIELDS: dict[str, Sequence[Any]] = FIELDS | {
    "front_end": [FULLY_SHARD],
    "strategy": [*FIELDS["strategy"], "2"],  # gathers for backward over groups of two ranks
    "precision": [*FIELDS["precision"], "output", "fp32+bf16"],
    "backwards": [*FIELDS["backwards"], "rrs", "kks"],
    "wrapping": ["root", "policy", "nested", "list"],
    "shape": ["", "columns", "tied", "codes"],
}


@dataclasses.dataclass(frozen=True, repr=False)
class Case:
    """Settings of one run. The values are in FLAT_FIELDS and ROW_FIELDS."""

    front_end: str = "flat"
    strategy: str = FULL_SHARD
    mesh: tuple[int, int] = (2, 2)
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
    shape: str = ""
    blocks: str = ""

    def __post_init__(self) -> None:
        fields = ROW_FIELDS if self.has_rows else FLAT_FIELDS
        for name, values in fields.items():
            assert getattr(self, name) in values, f"{name}={getattr(self, name)!r}, of {values}"

    def __repr__(self) -> str:
        given = ((field, getattr(self, field.name)) for field in dataclasses.fields(self))
        changed = [f"{field.name}={value!r}" for field, value in given if value != field.default]
        return f"Case({', '.join(changed)})"

    @property
    def has_rows(self) -> bool:
        return self.front_end == FULLY_SHARD

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


def cases(fields: dict[str, Sequence[Any]]) -> st.SearchStrategy[Case]:
    """Draw possible combinations of these values."""
    drawn = {name: st.sampled_from(values) for name, values in fields.items()}
    return st.builds(Case, **drawn).map(_possible)


def _possible(case: Case) -> Case:
    """Change a case that is impossible: a FlatParameter is trainable or frozen as a whole."""
    if case.frozen == "toggled" and case.wrapping == "root" and case.front_end == "flat":
        return dataclasses.replace(case, frozen="unit")
    return case


def trains_as_unsharded(case: Case) -> None:
    """Train beside the unsharded model. Collective."""
    with warnings.catch_warnings():
        # reentrant checkpoints and torch's hooks use deprecated calls
        warnings.simplefilter("ignore")
        _run(case)


def _run(case: Case) -> None:
    plain = _build(case, recomputes=False)
    pair = Pair(plain, wrapped(case))
    pair.plain_optim, pair.optim = (_optimizer(case, each) for each in (plain, pair.model))
    exact = case.dtypes.tolerance
    replicas = {"NO_SHARD": pair.ranks}.get(case.strategy, case.mesh[0] if case.is_hybrid else 1)
    sums_low = replicas > 1 or case.comm_hook
    rounded = case.dtypes.reduce.itemsize == 2 and sums_low and pair.ranks > 1
    for step in range(case.num_steps):
        if case.frozen == "toggled":
            for model in (pair.plain, pair.model):
                _toggle(case, model, step != 1)
        if case.dtypes.compute.itemsize == 2:  # the last bit of a weight may decide its rounding
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


class Coded(Layer):
    """Uses frozen parameters of other dtypes."""

    def __init__(self) -> None:
        super().__init__()
        codes = torch.randint(0, 255, (5, 4), dtype=torch.uint8)
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.low = nn.Parameter(torch.randn(6).to(BF16), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        assert self.codes.dtype is torch.uint8, "bytes are never cast"
        added = self.codes.float().mean() / 256 + self.low.float().mean()
        return super().forward(x) + added.to(x.dtype)


def _build(case: Case, recomputes: bool) -> nn.Module:
    torch.manual_seed(0)
    layer = Coded if case.shape == "codes" else Layer
    model = RecomputesBlocks(layer, case.reentrant, 1, 3) if recomputes else Stack(3, layer)
    if case.shape == "tied":
        model.head = nn.Linear(DIM, DIM)
        model.head.weight = model.stem.weight
    for name, p in model.named_parameters():
        if p.is_floating_point():
            p.requires_grad_(p.requires_grad and not _is_frozen(case, name))
            if p.dtype is FP32:
                p.data = p.data.to(case.dtypes.shard)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(case.dtypes.shard))
    return model


def wrapped(case: Case, library: Library = OURS) -> Any:
    """Return the sharded model. Collective."""
    model = _build(case, recomputes=case.checkpoint.startswith("function"))
    kind = CheckpointImpl.REENTRANT if case.reentrant else CheckpointImpl.NO_REENTRANT
    recompute = functools.partial(
        apply_activation_checkpointing,
        checkpoint_wrapper_fn=functools.partial(checkpoint_wrapper, checkpoint_impl=kind),
    )
    if case.checkpoint.startswith("inside"):
        recompute(model, check_fn=lambda module: isinstance(module, Layer))
    sharded = (_by_rows if case.has_rows else _flat)(case, model, library)
    if case.checkpoint.startswith("outside"):
        is_wrapped = not case.has_rows and case.wrapping != "root"
        inner = "_fsdp_wrapped_module"
        recompute(
            sharded,
            check_fn=lambda m: isinstance(getattr(m, inner, None) if is_wrapped else m, Layer),
        )
    return sharded


def _is_frozen(case: Case, name: str) -> bool:
    if case.frozen == "some":
        return name.startswith("blocks") and ("linear.weight" in name or "norm.bias" in name)
    return case.frozen in ("unit", "toggled") and name.startswith("blocks.1.")


def _toggle(case: Case, model: nn.Module, frozen: bool) -> None:
    """Freeze or unfreeze a whole unit, and a part of one where parameters stay apart."""
    apart = ("blocks.0.inner.up.weight", "blocks.2.linear.bias") if case.front_end != "flat" else ()
    for name, p in model.named_parameters():
        if plain_name(name).startswith(("blocks.1.", *apart)) and "codes" not in name:
            p.requires_grad_(not frozen and not name.endswith(".low"))


def _flat(case: Case, model: Any, library: Library) -> Any:
    backward_prefetch, _, forward = case.prefetch.partition(" ")
    mesh = init_device_mesh("cpu", case.mesh) if case.is_hybrid else None
    options: dict[str, Any] = {
        "sharding_strategy": library.ShardingStrategy[case.strategy],
        "device_mesh": mesh,
        "use_orig_params": case.front_end == "original",
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
    if case.blocks:
        options["shard_blocks"] = ShardBlocks(BLOCKS[case.blocks], max_padding=9)
    wrap = library.FullyShardedDataParallel
    if case.wrapping == "by hand":
        model.blocks = nn.ModuleList(wrap(block, **options) for block in model.blocks)
        model.stem = wrap(model.stem, **options)
    classes = _classes(case)
    policy = library.wrap.ModuleWrapPolicy(classes) if classes else None
    sharded = wrap(model, auto_wrap_policy=policy, **options)
    if case.comm_hook:
        splits = dist.get_world_size() > 1 and case.strategy != "NO_SHARD"
        splits = splits and not (case.is_hybrid and case.mesh[1] == 1)
        group = mesh.get_group(0) if mesh is not None and not splits else sharded.process_group
        hook = default_hooks.reduce_scatter_hook if splits else default_hooks.allreduce_hook
        sharded.register_comm_hook(default_hooks.DefaultState(group), hook)
    return sharded


def _classes(case: Case) -> tuple[type[nn.Module], ...]:
    outer = CheckpointWrapper if case.checkpoint.startswith("inside") else Layer
    found: dict[str, tuple[type[nn.Module], ...]] = {"policy": (outer,), "nested": (outer, Shifted)}
    return found.get(case.wrapping, ())


def _by_rows(case: Case, model: Any, library: Library) -> Any:
    shape = case.mesh if case.is_hybrid else (dist.get_world_size(),)
    after_forward: Any = (
        2 if case.strategy == "2" else case.strategy in (FULL_SHARD, "HYBRID_SHARD")
    )
    inner = {name: dtype for name, dtype in case.dtypes.settings.items() if name != "output_dtype"}
    options: dict[str, Any] = {
        "mesh": init_device_mesh(
            "cpu", shape, mesh_dim_names=("replicas", "shards")[-len(shape) :]
        ),
        "reshard_after_forward": after_forward,
        "shard_placement_fn": _columns if case.shape == "columns" else None,
        "mp_policy": library.MixedPrecisionPolicy(**inner),
    }
    if case.offload:
        options["offload_policy"] = library.CPUOffloadPolicy(pin_memory=False)
    classes = _classes(case)
    for unit in reversed([m for m in model.modules() if isinstance(m, classes)]):
        library.fully_shard(unit, **options)
    if case.wrapping == "list":
        library.fully_shard([*model.blocks], **options)
    options["mp_policy"] = library.MixedPrecisionPolicy(**case.dtypes.settings)
    return library.fully_shard(model, **options)


def _columns(p: nn.Parameter) -> Shard | None:
    return Shard(1) if p.ndim == 2 and p.shape[1] % 4 == 0 else None


def _optimizer(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    trainable = [p for p in model.parameters() if p.is_floating_point()]
    if case.optimizer == "SGD":
        return torch.optim.SGD(trainable, 0.02, momentum=0.9)
    # With the usual eps, a gradient that is only rounding error would give a full-size update.
    return torch.optim.AdamW(trainable, 1e-2, eps=1e-2)


# -- one step


@contextlib.contextmanager
def _backward_of(letter: str, model: Any) -> Iterator[None]:
    """Prepare a backward: n under no_sync, r without all-reduce, k kept unsharded, s the usual."""
    if letter in "ns":
        with no_sync(model) if letter == "n" else contextlib.nullcontext():
            yield
        return
    model.set_requires_all_reduce(letter != "r")
    model.set_reshard_after_backward(letter != "k")
    model.set_is_last_backward(letter != "k")
    yield
    model.set_requires_all_reduce(True)
    model.set_reshard_after_backward(True)
    model.set_is_last_backward(True)


def _loss(case: Case, model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    return (out.float() if out.dtype.itemsize == 2 else out).pow(2).mean()


def _compare_losses(case: Case, pair: Pair) -> None:
    """Do the backwards of one step in both models, and compare the losses. Collective."""
    batches = [x.to(case.dtypes.shard) for x in pair.batches(vectors)]
    expected = _plain_backwards(case, pair.plain, batches)[pair.rank]
    for index, letter in enumerate(case.backwards):
        with _backward_of(letter, pair.model):
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
            if letter != "n":
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
        dtype = case.dtypes.compute if p.dtype is case.dtypes.shard else p.dtype
        mine.grad, mine.data = None, p.data.to(dtype, copy=True)
    for module, its in zip(plain.modules(), low.modules(), strict=True):
        for name, buffer in module.named_buffers(recurse=False):
            dtype = case.dtypes.settings.get("buffer_dtype", buffer.dtype)
            setattr(its, name, buffer.to(dtype, copy=True))
    return low


def _compare_norms(case: Case, pair: Pair) -> None:
    """Clip both, and compare the norms. Collective."""
    if case.clip:
        norm_type = float(case.clip.split()[0])
        expected = nn.utils.clip_grad_norm_(pair.plain.parameters(), MAX_NORM, norm_type)
        assert expected > MAX_NORM
        if case.clip.endswith("torch"):
            norm = nn.utils.clip_grad_norm_(pair.model.parameters(), MAX_NORM, norm_type)
        else:
            norm = pair.model.clip_grad_norm_(MAX_NORM, norm_type)
        assert_close(whole(norm), expected, "norm", case.dtypes.tolerance)


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


# -- beside torch


def values_of_training(case: Case, library: Library) -> dict[str, Tensor | None]:
    """Train with ``library``; return what this rank sees in each step. Collective."""
    model = wrapped(case, library)
    if case.has_rows:
        return _values_of_rows(case, model)
    # backwards with sync before the last one come without an update
    *earlier, last = case.backwards
    pattern = "".join(earlier).replace("s", "a") + last
    return dict(recorded(library, model, _optimizer(case, model), pattern * case.num_steps))


def _values_of_rows(case: Case, model: Any) -> dict[str, Tensor | None]:
    """Both libraries shard in the same way, so that what this rank has can be compared."""
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    seen: dict[str, Tensor | None] = {}
    for step in range(case.num_steps):
        if case.frozen == "toggled":
            _toggle(case, model, step != 1)
        for part, letter in enumerate(case.backwards):
            with _backward_of(letter, model):
                x = torch.randn(4, DIM, generator=generator).to(case.dtypes.shard)
                out = model(x)
                out.double().pow(2).mean().backward()
            seen[f"{step}: output {part}"] = out.detach()
            if letter == "r" and case.is_hybrid:
                assert all(p.grad is None for p in model.parameters())
        reshard(model)
        for name, p in model.named_parameters():
            seen[f"{step}: gradient {name}"] = None if p.grad is None else local(p.grad).clone()
        _step_down(model)
        seen |= {f"{step}: {name}": local(p).clone() for name, p in model.named_parameters()}
    return seen


@torch.no_grad()
def _step_down(model: nn.Module) -> None:
    """Step down the gradients, on this rank's values, which costs less than DTensors."""
    for p in model.parameters():
        if p.grad is not None:
            local(p).sub_(local(p.grad), alpha=0.1)
            p.grad = None
