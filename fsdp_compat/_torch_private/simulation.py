"""What a simulated step on the meta device needs of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from . import dtensor_class

DispatchMode = TorchDispatchMode  # sees every operation below autograd

_aten = torch.ops.aten
# What a fused kernel keeps: the output, and a number for each row. With shapes on meta.
_ATTENTION = _aten._scaled_dot_product_flash_attention_for_cpu


def join_fake_group(world_size: int) -> None:
    """Become rank 0 of a fake default process group, in which nothing is sent."""
    # Its backend is registered by the module that has its store.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())


def key_of(storage: torch.UntypedStorage) -> int:
    """Return what tells a living storage from others."""
    result: int = storage._cdata
    return result


def has_dtensors(types: Iterable[type]) -> bool:
    """True if an operation's arguments are DTensors."""
    return any(issubclass(kind, dtensor_class()) for kind in types)


def asks_for_value(operation: Any) -> bool:
    """True for the operation below ``Tensor.item``, which no meta tensor can answer."""
    return operation is _aten._local_scalar_dense.default


def fused_attention(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return scaled_dot_product_attention with the memory of a fused kernel. On meta the original
    keeps the whole matrix of weights, which grows with the square of the length."""

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        **others: Any,
    ) -> Tensor:
        if not query.is_meta or dropout_p:
            options = {"scale": scale, **others}
            return original(query, key, value, attn_mask, dropout_p, is_causal, **options)
        output: Tensor = _ATTENTION(query, key, value, 0.0, is_causal, scale=scale)[0]
        return output

    return attention
