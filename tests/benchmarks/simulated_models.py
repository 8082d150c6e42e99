"""What ``simulated.py`` trains: models that are small here and stand for large ones.

A matrix product of the model here stands for one with ``flops_scale`` times its operations, and
every tensor for one of ``bytes_scale`` times its bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

LAYER_NUMEL = 200e6  # parameters of a layer of Llama 7B
LAYER_TOKENS = 4096
EXPERTS = 4


# -- models


class Mixed(nn.Module):
    """The first half of a block."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.o(torch.relu(self.q(y) + self.k(y) + self.v(y)))


class Block(Mixed):
    """The matrix products of a transformer's layer, one after the other."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        return x + self.down(torch.relu(self.up(x)))


class Experts(Mixed):
    """A block with experts, each for a part of the tokens. The last one gets none on this rank, so
    its parameters are not used."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 4 * dim), nn.ReLU(), nn.Linear(4 * dim, dim))
            for _ in range(EXPERTS)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        parts = zip(self.experts, x.tensor_split(EXPERTS - 1), strict=False)
        return x + torch.cat([expert(part) for expert, part in parts])


class Stack(nn.Module):
    """From activations to a loss."""

    def __init__(self, block: type[nn.Module], blocks: int, dim: int) -> None:
        super().__init__()
        self.inp = nn.Linear(dim, dim)
        self.blocks = nn.ModuleList(block(dim) for _ in range(blocks))
        self.out = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor, through: Callable[..., torch.Tensor]) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = through(block, x)
        return self.out(x).float().pow(2).mean()


class LlamaBlock(nn.Module):
    """As Llama 3.1 8B has it, with every dimension divided by ``Llama.SHRUNK``."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.heads, self.key_heads, self.head_dim = 32, 8, dim // 32
        keys = self.key_heads * self.head_dim
        self.attention_norm, self.norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.q, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(dim, keys, bias=False) for _ in range(2))
        hidden = dim * 7 // 2
        self.gate, self.up = (nn.Linear(dim, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        y = self.attention_norm(x)
        q, k, v = (self._heads(each(y)) for each in (self.q, self.k, self.v))
        q, k = (_rotated(each, rotation) for each in (q, k))
        repeats = self.heads // self.key_heads
        k, v = (each.repeat_interleave(repeats, dim=2) for each in (k, v))
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        attended = _attention(q, k, v)[0].transpose(1, 2).contiguous().flatten(2)
        x = x + self.o(attended)
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(2, (-1, self.head_dim))


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    """Flash attention: one kernel, without a matrix of scores in memory. What a device without a
    kernel of its own would get is not that."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)


def _rotated(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    turned = torch.view_as_complex(x.float().unflatten(3, (-1, 2))) * rotation
    return torch.view_as_real(turned).flatten(3).to(x.dtype)


class Llama(nn.Module):
    """Llama 3.1 8B, from tokens to a loss."""

    SHRUNK = 32  # every dimension is divided by it
    DIM, VOCABULARY, LAYERS = 4096, 128256, 32

    def __init__(self) -> None:
        super().__init__()
        dim, vocabulary = self.DIM // self.SHRUNK, self.VOCABULARY // self.SHRUNK
        self.tokens = nn.Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList(LlamaBlock(dim) for _ in range(self.LAYERS))
        self.norm, self.head = nn.RMSNorm(dim), nn.Linear(dim, vocabulary, bias=False)
        self.half_head = dim // 32 // 2

    def forward(self, tokens: torch.Tensor, through: Callable[..., torch.Tensor]) -> torch.Tensor:
        # [length, 1, half a head's dimension]
        rotation = torch.ones(
            tokens.shape[1], 1, self.half_head, dtype=torch.complex64, device=tokens.device
        )
        x = self.tokens(tokens)
        for block in self.blocks:
            x = through(block, x, rotation)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


class MptBlock(nn.Module):
    """As MPT 7B has it, with every dimension divided by ``Mpt.SHRUNK``."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.head_dim = dim // 32
        self.attention_norm, self.norm = (nn.LayerNorm(dim, bias=False) for _ in range(2))
        self.qkv, self.o = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.up = nn.Linear(dim, 4 * dim, bias=False)
        self.down = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.attention_norm(x)).chunk(3, dim=2)
        q, k, v = (part.unflatten(2, (-1, self.head_dim)).transpose(1, 2) for part in parts)
        x = x + self.o(_attention(q, k, v)[0].transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Mpt(nn.Module):
    """MPT 7B, from tokens to a loss. Its head is its embedding."""

    SHRUNK = 32
    DIM, VOCABULARY, LAYERS = 4096, 50368, 32

    def __init__(self, length: int) -> None:
        super().__init__()
        dim, vocabulary = self.DIM // self.SHRUNK, self.VOCABULARY // self.SHRUNK
        self.tokens, self.positions = nn.Embedding(vocabulary, dim), nn.Embedding(length, dim)
        self.blocks = nn.ModuleList(MptBlock(dim) for _ in range(self.LAYERS))
        self.norm = nn.LayerNorm(dim, bias=False)

    def forward(self, tokens: torch.Tensor, through: Callable[..., torch.Tensor]) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions.weight
        for block in self.blocks:
            x = through(block, x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


# -- what they stand for


@dataclasses.dataclass(frozen=True)
class Model:
    build: Callable[[], nn.Module]
    block: type[nn.Module]
    inputs: Callable[[], torch.Tensor]
    description: str
    bytes_scale: float
    flops_scale: float
    block_numel: int  # parameters of a block here
    length: int = 0  # that a sequence with attention stands for


def stack(
    block: type[nn.Module],
    blocks: int,
    dim: int,
    tokens: int,
    description: str,
    layer_dim: int = 192,
) -> Model:
    """A layer of the plain stack of ``layer_dim`` stands for one of Llama 7B with 4096 tokens;
    others are larger or smaller in proportion."""
    scale = LAYER_NUMEL / (12 * layer_dim**2)
    numel = sum(parameter.numel() for parameter in block(dim).parameters())
    return Model(
        build=lambda: Stack(block, blocks, dim),
        block=block,
        inputs=lambda: torch.randn(tokens, dim),
        description=description,
        bytes_scale=scale,
        flops_scale=scale * LAYER_TOKENS / tokens,
        block_numel=numel,
    )


def transformer(
    kind: type[Llama] | type[Mpt], block: type[nn.Module], name: str, batch: int, length: int
) -> Model:
    small = length // kind.SHRUNK
    numel = sum(parameter.numel() for parameter in block(kind.DIM // kind.SHRUNK).parameters())
    return Model(
        build=Llama if kind is Llama else lambda: Mpt(small),
        block=block,
        inputs=lambda: torch.randint(0, kind.VOCABULARY // kind.SHRUNK, (batch, small)),
        description=f"{name}, {batch} x {length} tokens per rank",
        bytes_scale=kind.SHRUNK**2,
        flops_scale=kind.SHRUNK**3,
        block_numel=numel,
        length=length,
    )


MODELS: dict[str, Callable[[], Model]] = {
    "blocks": lambda: stack(Block, 8, 192, 32, "8 blocks like layers of Llama 7B, 4096 tokens"),
    # Fixed bytes, of alignment for example, have a sixteenth of the share.
    "wide": lambda: stack(
        Block, 8, 768, 32, "8 wide blocks like layers of Llama 7B, 4096 tokens", layer_dim=768
    ),
    "small": lambda: stack(Block, 32, 48, 32, "32 blocks of a sixteenth of a Llama 7B layer"),
    "experts": lambda: stack(
        Experts, 8, 96, 48, f"8 blocks of {EXPERTS} experts, of which one gets no tokens"
    ),
    "llama": lambda: transformer(Llama, LlamaBlock, "Llama 3.1 8B", batch=2, length=8192),
    "mpt": lambda: transformer(Mpt, MptBlock, "MPT 7B", batch=6, length=2048),
}


# -- recomputation

# The calls of blocks are checkpointed; or what a block does inside its call, of which attention and
# every second matrix product are kept.
RECOMPUTES = ("none", "blocks", "some")


def call_block(block: nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = block(*inputs)
    return found


def recompute_block(block: nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = checkpoint(block, *inputs, use_reentrant=False)
    return found


def keep_some(block: nn.Module) -> None:
    """Checkpoint what the block does, before it is wrapped: as torchtitan's selective activation
    checkpointing by operation."""
    forward = block.forward

    def contexts() -> Any:
        products = {False: 0, True: 0}

        def policy(context: Any, op: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
            if op is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default:
                return CheckpointPolicy.MUST_SAVE
            if op is torch.ops.aten.mm.default:
                products[context.is_recompute] += 1
                if products[context.is_recompute] % 2:
                    return CheckpointPolicy.MUST_SAVE
            return CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    def checkpointed(*inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = checkpoint(forward, *inputs, use_reentrant=False, context_fn=contexts)
        return found

    block.forward = checkpointed  # type: ignore[method-assign]
