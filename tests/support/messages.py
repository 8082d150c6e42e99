"""What a rank sends, as torch's dispatcher sees it. Ranks of one host must be told to send
messages:

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
from torch.utils._pytree import tree_leaves


class Messages(TorchDispatchMode):
    """Notes the messages and collectives that begin inside the context.

    sent: by dtype, the number of elements of each message. calls: the name of each operation, and
    the number of elements and the dtype of its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: dict[torch.dtype, list[int]] = collections.defaultdict(list)
        self.calls: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func.overloadpacket.__name__
            tensors = [each for each in tree_leaves(args) if isinstance(each, torch.Tensor)]
            self.calls.append((name, *((tensor.numel(), tensor.dtype) for tensor in tensors)))
            for tensor in tensors if name == "send" else ():
                self.sent[tensor.dtype].append(tensor.numel())
        return func(*args, **(kwargs or {}))
