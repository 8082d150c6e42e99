"""The small models of the tests. Each covers one thing that an engine may get wrong, which its
docstring names."""

from __future__ import annotations

import copy
import random
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, weight_norm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

DIM = 8
WIDE = 64  # for weights that should be larger than the activations around them
NUM_TOKENS = 11


# -- blocks and stacks


class Block(nn.Module):
    """The usual residual block."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(dim),
            nn.Linear(dim, 2 * dim),
            nn.Linear(2 * dim, dim),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Inner(Block):
    """A block of another class, so that a policy can select nested units."""


class Outer(nn.Module):
    """A unit with nested units, and its own parameters used between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.second = Inner(), nn.Linear(DIM, DIM), Inner()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.middle(self.first(x)).tanh()) + x


class Stack(nn.Module):
    """A root with its own parameters around blocks."""

    def __init__(self, num_blocks: int = 3, make: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.stem = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(make() for _ in range(num_blocks))
        self.head = nn.Linear(DIM, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Shifted(Block):
    """A block with a buffer, whose values every dtype rounds differently."""

    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.randn(DIM))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.shift.to(x.dtype)


class Layer(nn.Module):
    """A block that a policy may make a unit, beside parameters outside it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.linear, self.scale = (
            Shifted(),
            nn.Linear(DIM, DIM),
            nn.Parameter(torch.full((DIM,), 1.5)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.inner(x)).tanh() * self.scale + x


def chain(*makes: Callable[[], nn.Module]) -> nn.Sequential:
    """Return modules in sequence; ``partial(chain, ...)`` can be sent to other processes, a lambda
    cannot."""
    return nn.Sequential(*(make() for make in makes))


def frozen(make: Callable[[], nn.Module]) -> nn.Module:
    return make().requires_grad_(False)


# -- sizes and ties


class Odd(nn.Module):
    """Parameters of 0 dimensions, of 3 elements and of none."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.randn(3))
        self.none, self.weight = nn.Parameter(torch.empty(0, 5)), nn.Parameter(torch.randn(DIM, 3))

    def forward(self, x: Tensor) -> Tensor:
        shifted = x * self.scale + F.pad(self.shift, (0, DIM - 3))
        return shifted + self.none.sum() + (x @ self.weight).sum(-1, keepdim=True)


class Tiny(nn.Module):
    """Fewer elements than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Head(nn.Linear):
    """A separate class, for policies."""


class Transformer(nn.Module):
    """Embedding and head share a weight; both may be units."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(NUM_TOKENS, DIM), Head(DIM, NUM_TOKENS)
        self.layers = nn.ModuleList(encoder_layer() for _ in range(2))
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def encoder_layer() -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(DIM, 2, 16, dropout=0.0, batch_first=True)


class TiedInside(nn.Module):
    """Two modules of one unit share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh())


# -- how units are called


class Reuse(nn.Module):
    """One unit runs twice: on its own output through another unit, or in parallel."""

    def __init__(self, chained: bool) -> None:
        super().__init__()
        self.a, self.b, self.chained = Block(), Block(), chained

    def forward(self, x: Tensor) -> Tensor:
        return self.a(self.b(self.a(x))) if self.chained else self.b(self.a(x)) + self.a(x * 2)


class Halves(nn.Module):
    """Each call uses one half of the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, second: bool) -> Tensor:
        return self.b(x).tanh() if second else self.a(x).tanh()


class HalvesInTurn(nn.Module):
    """One unit runs twice, each time using other parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.halves, self.block = Halves(), Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.halves(self.block(self.halves(x, False)), True)


class Recursive(nn.Module):
    """A unit that calls itself, and uses its parameters afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, depth: int = 3) -> Tensor:
        inner = self(x * 0.5, depth - 1) if depth else 0
        return self.linear(x + inner).tanh() + inner


class TwoHeads(nn.Module):
    """Two outputs over one body; a loss may use one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.left, self.right = Block(), Block(), Block()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.body(x)
        return self.left(x), self.right(x)


class Switch(nn.Module):
    """``use``: the inner units that run, in order: "ab", "a", "ba", ""."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.a, self.b, self.last = Block(), Block(), Block(), Block()

    def forward(self, x: Tensor, use: str) -> Tensor:
        x = self.first(x)
        for letter in use:
            x = x + getattr(self, letter)(x)
        return self.last(x)


class Named(typing.NamedTuple):
    first: Tensor
    rest: list[Any]


@dataclass
class Record:
    value: dict[str, Any]
    label: str = ""


class NestedIO(nn.Module):
    """Inputs and outputs in a dataclass, a dict, a named tuple and a list."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, record: Record) -> Record:
        x = record.value["x"]
        return Record({"x": self.a(x).tanh(), "extra": Named(self.b(x), [x * 2, None, 3])}, "out")


class NestedChain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = NestedIO(), NestedIO()

    def forward(self, x: Tensor) -> Record:
        return self.b(self.a(Record({"x": x * 1})))


class ChangesItsInput(Block):
    """Modifies its input in place: a hook on that tensor would be lost."""

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(0.5)
        return super().forward(x)


class ChangesOutputs(Stack):
    """Modifies the outputs of its units in place."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
            x.add_(1).mul_(0.7)
        return self.head(x)


class ChangesActivations(nn.Module):
    """Adds a parameter to an activation in place: they must not share a version counter."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.bias, self.b = (
            nn.Linear(DIM, DIM, bias=False),
            nn.Parameter(torch.zeros(DIM)),
            nn.Linear(DIM, DIM),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.relu_(self.a(x).add_(self.bias)))


class TakesContext(nn.Module):
    """An attribute brings in a tensor with a gradient; the last weight on its path is frozen."""

    context: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.own, self.frozen = nn.Linear(DIM, DIM), frozen(lambda: nn.Linear(DIM, DIM))
        self.context = None

    def forward(self, x: Tensor) -> Tensor:
        return self.own(x).tanh() + self.frozen(self.context)


class GivesContext(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.source, self.user, self.tail = Block(), TakesContext(), Block()
        self._users = [self.user]  # the module itself: a wrapper does not forward assignments

    def forward(self, x: Tensor) -> Tensor:
        self._users[0].context = self.source(x)
        out = self.tail(self.user(x))
        self._users[0].context = None
        return out


class LossAside(nn.Module):
    """Stores a loss of its own as an attribute."""

    aux: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x).tanh()
        self.aux = self.b(hidden).pow(2).mean()
        return hidden * 1


class LossAsideFromNone(LossAside):
    """The attribute exists from the beginning, as None."""

    def __init__(self) -> None:
        super().__init__()
        self.aux = None


class LossElsewhere(LossAside):
    """Puts its loss into a list that belongs to no module."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = super().forward(x)
        elsewhere.append(self.__dict__.pop("aux"))
        return hidden


elsewhere: list[Tensor] = []


# -- frozen, unused, dtypes


class Lora(nn.Module):
    """The gradient of the input needs the frozen weight after the last trainable parameter has its
    gradient."""

    def __init__(self, dim: int = WIDE) -> None:
        super().__init__()
        self.w, self.a, self.b = (
            nn.Linear(dim, dim, bias=False),
            nn.Linear(dim, 2, bias=False),
            nn.Linear(2, dim, bias=False),
        )
        self.w.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w(x) + self.b(self.a(x))


class FrozenInCheckpoint(nn.Module):
    """A frozen part is recomputed after the last trainable parameter of the unit has its
    gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.tail = frozen(Block), Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(checkpoint(self.frozen, x, use_reentrant=False))


class SpareParameter(Block):
    """Has parameters that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(3, 5)


class ManyDtypes(Block):
    """float32, bfloat16 and int8 in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(
            torch.randint(-128, 127, (5, 3), dtype=torch.int8), requires_grad=False
        )
        self.low = nn.Parameter(torch.randn(6).bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0.01 * self.codes.float().mean() + self.low.float().mean()


# -- recomputation


def saves_products(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """A policy of selective checkpoints, as the next two."""
    saved = op in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def saves_everything(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE


def saves_nothing(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_RECOMPUTE


class ForwardProducts(TorchDispatchMode):
    """Counts products of linear modules that a forward or a recomputation computes."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func is torch.ops.aten.addmm.default
        return func(*args, **(kwargs or {}))


class Recomputed(Block):
    """Checkpoints its whole forward."""

    def __init__(self, reentrant: bool, **options: Any) -> None:
        """options: for ``checkpoint``."""
        super().__init__()
        self.options = {"use_reentrant": reentrant, **options}

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, **self.options)


def _in_turn(x: Tensor, blocks: Sequence[nn.Module]) -> Tensor:
    for block in blocks:
        x = block(x)
    return x


class RecomputesBlocks(Stack):
    """Checkpoints around ``span`` blocks each."""

    def __init__(
        self,
        make: Callable[[], nn.Module],
        reentrant: bool,
        span: int = 1,
        num_blocks: int = 4,
        **options: Any,
    ) -> None:
        """options: for ``checkpoint``."""
        super().__init__(num_blocks, make)
        self.span, self.options = span, {"use_reentrant": reentrant, **options}

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for start in range(0, len(self.blocks), self.span):
            x = checkpoint(_in_turn, x, self.blocks[start : start + self.span], **self.options)
        return self.head(x)


class DropsAnOutput(nn.Module):
    """A checkpoint with two outputs, one of which reaches the loss."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.stem, self.a, self.b, self.c, self.reentrant = (
            Block(),
            Block(),
            Block(),
            Block(),
            reentrant,
        )

    def _region(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a = self.a(x)
        return a, self.c(self.b(x))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._region, self.stem(x), use_reentrant=self.reentrant)[0]


class RecomputesTwice(nn.Module):
    """One unit in two checkpoints."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.stem, self.a, self.reentrant = nn.Linear(DIM, DIM), Block(), reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.a, self.stem(x), use_reentrant=self.reentrant)
        return checkpoint(self.a, x, use_reentrant=self.reentrant)


# -- exceptions


class _Fuse(torch.autograd.Function):
    """The identity, whose backward raises while the fragile module is armed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, owner: Fragile) -> Tensor:
        ctx.owner = owner
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        if ctx.owner.fault_in_backward:
            raise ValueError("backward")
        return grad, None


class Fragile(Block):
    """Raises on request, in backward before any of its own gradients exists."""

    def __init__(self) -> None:
        super().__init__()
        self.fault_in_forward: type[BaseException] | None = None
        self.fault_in_backward = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fault_in_forward is not None:
            raise self.fault_in_forward("forward")
        return self._compute(x)

    def _compute(self, x: Tensor) -> Tensor:
        return _Fuse.apply(super().forward(x), self)


class FragileInside(Fragile):
    """Raises in backward when some of its own gradients exist already."""

    def _compute(self, x: Tensor) -> Tensor:
        return x + self.down(_Fuse.apply(F.gelu(self.up(self.norm(x))), self))


# -- backward inside forward


class Forces(nn.Module):
    """Takes the derivative of an energy in forward: running units must stay unsharded."""

    def __init__(self) -> None:
        super().__init__()
        self.energy, self.after = Stack(2), Block()

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        with torch.enable_grad():
            (forces,) = torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)
        return self.after(forces)


# -- modules of torch


class SparseEmbedding(nn.Module):
    """Its gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block = nn.Embedding(NUM_TOKENS, DIM, sparse=True), Block()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.block(self.embed(tokens))


class Copies(nn.Sequential):
    """Blocks made by deepcopy."""

    def __init__(self) -> None:
        block = Block()
        super().__init__(block, copy.deepcopy(block), copy.deepcopy(block))


class Parametrized(nn.Module):
    """A linear layer whose weight is computed from other parameters."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        wrap = {
            "old weight_norm": weight_norm,
            "weight_norm": parametrizations.weight_norm,
            "spectral_norm": parametrizations.spectral_norm,
            "orthogonal": parametrizations.orthogonal,
        }[kind]
        self.linear = wrap(nn.Linear(DIM, DIM))
        self.train(kind != "spectral_norm")  # the power iteration depends on the number of calls

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


class Recurrent(nn.Module):
    """An RNN also keeps its weights in a list."""

    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.rnn, self.head = kind(DIM, DIM, num_layers=2, batch_first=True), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0])


class Attention(nn.Module):
    """nn.MultiheadAttention reads the weight of its output projection without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.block = nn.MultiheadAttention(DIM, 2, batch_first=True), Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.attention(x, x, x)[0])


class Blocks(nn.Module):
    """Two blocks, compiled or not."""

    def __init__(self, compiled: bool) -> None:
        super().__init__()
        blocks = [Block() for _ in range(2)]
        self.blocks = nn.ModuleList(
            torch.compile(b, backend="aot_eager") if compiled else b for b in blocks
        )

    def forward(self, x: Tensor) -> Tensor:
        return _in_turn(x, self.blocks)


# -- random programs


class Part(nn.Module):
    """A unit of one ``kind``: which parts are frozen or recomputed, and how it gets its inputs."""

    def __init__(self, kind: int) -> None:
        super().__init__()
        self.kind, self.a, self.b = kind, nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.inner = Block() if kind % 3 == 0 else None
        if kind % 4 == 1:
            self.a.requires_grad_(False)
        if kind % 4 == 2:
            self.b.requires_grad_(False)
        if kind % 7 == 6:
            self.requires_grad_(False)

    def forward(
        self, x: Tensor, context: Tensor | None = None, late: Callable[[], Tensor] | None = None
    ) -> Any:
        recomputed = self.kind % 5 in (1, 2)
        h = (
            checkpoint(self.a, x, use_reentrant=self.kind % 5 == 2) if recomputed else self.a(x)
        ).tanh()
        if self.inner is not None:
            h = self.inner(h).tanh()
        if self.kind % 5 == 3:
            h = h + (x @ self.b.weight.detach()).tanh()
        h = self.b(h if context is None else h + context).tanh()
        if late is not None:  # an input that is not among the arguments
            h = h + self.a(late()).tanh()
        return h, {"second": h * 0.5 + x}


class Program(nn.Module):
    """A straight-line program over units, drawn from ``rng``: equal for equal ``rng``."""

    def __init__(self) -> None:
        super().__init__()
        self.parts, self.stem = nn.ModuleList(Part(kind) for kind in range(8)), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, rng: random.Random) -> list[Tensor]:
        """Return two losses."""
        values = [self.stem(x), x]
        for _ in range(rng.randint(3, 9)):
            out = self._call(rng, rng.choice(values), rng.choice(values))
            if not isinstance(out, Tensor):
                out = out[1]["second"] if rng.random() < 0.4 else out[0]
            values.append(out if rng.random() < 0.7 else out + rng.choice(values) * 0.3)
        return [
            _sum(v.pow(2).mean() for v in rng.sample(values, 2)) + values[-1].mean()
            for _ in range(2)
        ]

    def _call(self, rng: random.Random, a: Tensor, b: Tensor) -> Any:
        part, how = rng.choice(list(self.parts)), rng.randrange(10)
        if how == 0:
            return part(a.detach())
        if how == 1:
            with torch.no_grad():
                return part(a, b)
        if how == 2:
            return checkpoint(part, a, b, use_reentrant=False)
        if how == 3:
            return checkpoint(lambda a, b: part(a, b)[0], a, b, use_reentrant=True)
        if how == 4:
            return part(a, late=lambda: b)
        if how == 5:
            other = rng.choice(list(self.parts))
            return checkpoint(lambda a, b: other(part(a)[0], b), a, b, use_reentrant=False)
        if how == 6:
            return part(a.clone().mul_(0.9), b)
        return part(a, b if how == 7 else None)


def _sum(values: Any) -> Any:
    return sum(values)
