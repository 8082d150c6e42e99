"""The small models of the tests. Each covers one thing that an engine may get wrong, which its
docstring names."""

from __future__ import annotations

import random
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
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


class Large(nn.Module):
    """A block whose matrices have 65536 elements: on the CPU each gradient moves on by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 8192), nn.Linear(8192, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


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


class Tied(nn.Module):
    """Two modules of one unit share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x).tanh())


class GradientIs(nn.Module):
    """The gradient of ``weight`` is the input, bit for bit."""

    def __init__(self, numel: int = 8, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x.to(self.weight.dtype)).sum()


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


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(12, width, bias=False), nn.LayerNorm(width)
        self.down = nn.Linear(width, 12)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.norm(self.up(x))))


class Layers(nn.Module):
    """Blocks of several widths: a module used twice, a frozen parameter, a 0-d one, a buffer, and a
    layer that is not used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Residual(17), Residual(30)])
        self.head = nn.Linear(12, 12)
        self.again = self.head
        self.unused, self.scale = Residual(9), nn.Parameter(torch.tensor(2.0))
        self.layers[1].norm.weight.requires_grad_(False)
        self.register_buffer("shift", torch.full((1,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.again(self.head(x)) * self.scale + self.shift


# -- how units are called


class Reuse(nn.Module):
    """One unit runs twice: on its own output through another unit, or in parallel."""

    def __init__(self, chained: bool) -> None:
        super().__init__()
        self.a, self.b, self.chained = Block(), Block(), chained

    def forward(self, x: Tensor) -> Tensor:
        return self.a(self.b(self.a(x))) if self.chained else self.b(self.a(x)) + self.a(x * 2)


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


# -- recomputation


def saves_products(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """A policy of selective checkpoints, as the next two."""
    saved = op in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def saves_everything(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE


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


# -- modules of torch


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


@dataclass(frozen=True)
class Line:
    """One line of a program: a part is called with earlier values, in one of ten ways. Parts and
    values are given by their numbers."""

    first: int
    second: int
    part: int
    how: int
    other: int = 0  # the part after the first one, both in one checkpoint
    takes_second: bool = False  # of the two outputs
    adds: int | None = None  # a value that is added to the output


@dataclass(frozen=True)
class Script:
    """A straight-line program over units, and the values that make up each of its two losses."""

    lines: tuple[Line, ...]
    losses: tuple[tuple[int, int], ...]

    @classmethod
    def drawn(cls, rng: random.Random) -> Script:
        """Equal for equal ``rng``, which hypothesis may give."""
        lines = list[Line]()
        for _ in range(rng.randint(3, 9)):
            values = range(len(lines) + 2)
            first, second, part = rng.choice(values), rng.choice(values), rng.choice(range(8))
            how = rng.randrange(10)
            other = rng.choice(range(8)) if how == 5 else 0
            takes_second = how != 3 and rng.random() < 0.4
            adds = None if rng.random() < 0.7 else rng.choice(values)
            lines.append(Line(first, second, part, how, other, takes_second, adds))
        values = range(len(lines) + 2)
        return cls(tuple(lines), tuple((*rng.sample(values, 2),) for _ in range(2)))


class Program(nn.Module):
    """Runs scripts over its units."""

    def __init__(self) -> None:
        super().__init__()
        self.parts, self.stem = nn.ModuleList(Part(kind) for kind in range(8)), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, script: Script | random.Random) -> list[Tensor]:
        """Return two losses. script: it is drawn, if a source of random numbers is given."""
        script = script if isinstance(script, Script) else Script.drawn(script)
        values = [self.stem(x), x]
        for line in script.lines:
            out = self._call(line, values[line.first], values[line.second])
            if not isinstance(out, Tensor):
                out = out[1]["second"] if line.takes_second else out[0]
            values.append(out if line.adds is None else out + values[line.adds] * 0.3)
        return [
            values[first].pow(2).mean() + values[second].pow(2).mean() + values[-1].mean()
            for first, second in script.losses
        ]

    def _call(self, line: Line, a: Tensor, b: Tensor) -> Any:
        part, other = self.parts[line.part], self.parts[line.other]
        match line.how:
            case 0:
                return part(a.detach())
            case 1:
                with torch.no_grad():
                    return part(a, b)
            case 2:
                return checkpoint(part, a, b, use_reentrant=False)
            case 3:
                return checkpoint(lambda a, b: part(a, b)[0], a, b, use_reentrant=True)
            case 4:
                return part(a, late=lambda: b)
            case 5:
                return checkpoint(lambda a, b: other(part(a)[0], b), a, b, use_reentrant=False)
            case 6:
                return part(a.clone().mul_(0.9), b)
            case how:
                return part(a, b if how == 7 else None)


# -- made of parts


class Unit(nn.Module):
    """A class for policies, of all that ``made_of`` returns."""


def made_of(forward: Callable[..., Any], **makes: Callable[[], Any]) -> Callable[[], Unit]:
    """Return what makes a module of these submodules, parameters or values, and a forward."""

    def make() -> Unit:
        module = type("Made", (Unit,), {"forward": forward})()
        for name, part in makes.items():
            setattr(module, name, part())
        return module

    return make
