"""Whether tensors have been given other memory."""

from __future__ import annotations

import torch
from torch import nn

from fsdp_compat._engine.user_changes import Addresses


def test_writes_and_gradients_leave_addresses_unchanged() -> None:
    param = nn.Parameter(torch.ones(4))
    addresses = Addresses([param])
    with torch.no_grad():
        param.add_(1)
    param.grad = torch.ones(4)
    assert not addresses.changed()


def test_other_memory_size_or_dtype_is_a_change_until_it_is_noted() -> None:
    param, other = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(2))
    addresses = Addresses([other, param])
    for change in (torch.clone, lambda data: data[:2], lambda data: data.half(), as_bfloat16):
        param.data = change(param.data)
        assert addresses.changed()
        addresses.record()
        assert not addresses.changed()


def as_bfloat16(data: torch.Tensor) -> torch.Tensor:
    """The same memory, of as many elements."""
    return data.view(torch.bfloat16)
