"""requires_grad, which users may change between steps."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

from torch import nn

from ..errors import StateError
from .group_memory import GroupMemory
from .store import ParamStore


class RequiresGrad:
    """Keeps requires_grad of unsharded parameters equal to that of the sharded ones."""

    def __init__(
        self, store: ParamStore, memories: Sequence[GroupMemory], hooked: Collection[nn.Parameter]
    ) -> None:
        """hooked: unsharded parameters that each need a hook once they are trainable."""
        self._store, self._memories = store, memories
        self._last = [param.requires_grad for param, _ in store.sharded_params]
        self._without_hook = set(hooked)

    def follow(self, where: str) -> list[tuple[int, nn.Parameter]]:
        """Apply changes since the last call. Return (index, parameter) of those that now need a
        hook. Raises StateError if parts of a FlatParameter disagree. where: for errors."""
        found = []
        for position, (sharded_param, indices) in enumerate(self._store.sharded_params):
            before = sharded_param.requires_grad
            if before is self._last[position]:
                toggled = [
                    any(m.unsharded_params[i].requires_grad is not before for m in self._memories)
                    for i in indices
                ]
                follow_toggles(sharded_param, toggled, where)
            self._last[position] = requires_grad = sharded_param.requires_grad
            for index, memory in itertools.product(indices, self._memories):
                param = memory.unsharded_params[index]
                param.requires_grad_(requires_grad)
                if requires_grad and param in self._without_hook:
                    self._without_hook.remove(param)
                    found.append((index, param))
        return found


def follow_toggles(sharded_param: nn.Parameter, toggled: Sequence[bool], where: str) -> None:
    """Toggle requires_grad of a sharded parameter if the user has toggled its unsharded parameters;
    raise StateError if only some of them. toggled: one per unsharded parameter."""
    if not any(toggled):
        return
    before = sharded_param.requires_grad
    if not all(toggled):
        raise StateError.of(
            "requires_grad was changed for only some of the parameters in a FlatParameter.",
            expected="a change for all parameters of the FlatParameter, or use_orig_params=True",
            got=f"{sum(toggled)} of {len(toggled)} parameters with requires_grad={not before}",
            where=where,
            fix="set requires_grad before wrapping, or pass use_orig_params=True",
        )
    sharded_param.requires_grad_(not before)
