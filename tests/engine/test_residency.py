"""What modules show of their parameters, before, inside and after a forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_compat import FullyShardedDataParallel, StateError
from tests.support.fully_sharded import OURS
from tests.support.ranks import on_ranks

NAMES = ["first.weight", "first.bias", "last.weight", "last.bias"]


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 2), nn.Linear(2, 2)
        self.inside: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        self.inside = [(name, p.shape, p._version) for name, p in self.named_parameters()]
        if hasattr(self, "reshard"):
            self.reshard()  # waits until forward has ended
        return self.last(self.first(x))


@pytest.mark.parametrize("layout", ["flat", "original", "rows"])
@on_ranks(2)
def test_forward_sees_whole_parameters_in_their_order_and_leaves_their_versions(
    layout: str,
) -> None:
    """Two of the four parameters are not sharded."""
    module: Any = Pair()
    expected = [(name, p.shape) for name, p in module.named_parameters()]
    ignored = [module.first.bias, module.last.weight]
    if layout == "rows":
        model = OURS.fully_shard(module, ignored_params=set(ignored))
    else:
        options = {"ignored_states": ignored, "use_orig_params": layout == "original"}
        model = FullyShardedDataParallel(module, **options)
    before = [name for name, _ in module.named_parameters()]
    assert before == (["_flat_param", *NAMES[1:3]] if layout == "flat" else NAMES)
    versions = []
    for _ in range(3):
        with torch.no_grad():
            model(torch.ones(1, 3))
        assert [(name, shape) for name, shape, _ in module.inside] == expected
        versions.append([version for _, _, version in module.inside])
        assert [name for name, _ in module.named_parameters()] == before
    assert versions[1:] == versions[:1] * 2


def as_bfloat16(data: Tensor) -> Tensor:
    """The same memory, of as many elements."""
    return data.view(torch.bfloat16)


def half_of(data: Tensor) -> Tensor:
    return data[: len(data) // 2]


@pytest.mark.parametrize("change", [torch.Tensor.float, as_bfloat16, half_of])
@on_ranks(2)
def test_another_dtype_or_size_of_the_same_memory_is_refused_in_the_next_forward(
    change: Callable[[Tensor], Tensor],
) -> None:
    model, x = FullyShardedDataParallel(nn.Linear(4, 4).half()), torch.ones(1, 4).half()
    for _ in range(2):
        model(x).float().sum().backward()
    for parameter in model.parameters():
        parameter.data = change(parameter.data)
    with pytest.raises(StateError, match="no longer fits its shard"):
        model(x)
