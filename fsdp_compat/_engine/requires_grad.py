"""requires_grad of unsharded parameters: it follows that of the sharded parameters, which the user
sees between steps."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import nn

from ..errors import StateError
from .storage import GroupMemory
from .store import ParamStore


class RequiresGrad:
    """Keeps requires_grad of one group's parameters in agreement."""

    def __init__(
        self, store: ParamStore, memories: Sequence[GroupMemory], large: Collection[nn.Parameter]
    ) -> None:
        """large: unsharded parameters that need a hook each once they are trainable."""
        self._store, self._memories = store, memories
        self._last = [param.requires_grad for param, _ in store.sharded_params]
        self._without_hook = set(large)

    def follow(self, where: str) -> list[tuple[int, nn.Parameter]]:
        """Apply changes since the last call. Return the large parameters, with their indices, that
        are trainable for the first time: they need a hook.

        Raises StateError where parts of a FlatParameter disagree. where: the unit, for the error.
        """
        for position, (sharded_param, indices) in enumerate(self._store.sharded_params):
            before = sharded_param.requires_grad
            if before is self._last[position]:
                toggled = [
                    any(m.unsharded_params[i].requires_grad is not before for m in self._memories)
                    for i in indices
                ]
                follow_toggles(sharded_param, toggled, where)
            self._last[position] = sharded_param.requires_grad
        found = []
        for memory in self._memories:
            params = memory.unsharded_params
            for sharded_param, indices in self._store.sharded_params:
                requires_grad = sharded_param.requires_grad
                for index in indices:
                    param = params[index]
                    if param.requires_grad is not requires_grad:
                        param.requires_grad_(requires_grad)
                    if requires_grad and param in self._without_hook:
                        self._without_hook.remove(param)
                        found.append((index, param))
        return found


def follow_toggles(sharded_param: nn.Parameter, toggled: Sequence[bool], where: str) -> None:
    """Toggle requires_grad of a sharded parameter if the user has toggled its unsharded parameters,
    inside forward or summon_full_params. toggled: one per unsharded parameter.

    Raises StateError if only some of them were toggled.
    """
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
