"""What a rank sends, as torch's dispatcher sees it, if the ranks of one host send messages:

@on_ranks(2, environment=MESSAGES)
def test_a_backward_sends_each_gradient_once() -> None:
    with Messages() as messages:
        model(x).sum().backward()
    assert messages.sent == {torch.float32: [8, 8]}"""

from __future__ import annotations

import collections
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Messages(TorchDispatchMode):
    """``sent``: by dtype, the number of elements of each message sent inside the context."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: dict[torch.dtype, list[int]] = collections.defaultdict(list)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and func.overloadpacket.__name__ == "send":
            for tensor in args[0]:
                self.sent[tensor.dtype].append(tensor.numel())
        return func(*args, **(kwargs or {}))
