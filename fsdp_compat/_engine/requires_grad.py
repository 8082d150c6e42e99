"""requires_grad of unsharded parameters: it follows that of the sharded parameters, which the user
sees between steps."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import nn

from ..errors import StateError, explain
from .storage import GroupMemory
from .store import ParamStore

__all__ = ["RequiresGrad"]


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
            if sharded_param.requires_grad is self._last[position]:
                self._follow_unsharded_params(sharded_param, indices, where)
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

    def _follow_unsharded_params(
        self, sharded_param: nn.Parameter, indices: Sequence[int], where: str
    ) -> None:
        """The user may have toggled unsharded parameters inside forward: this counts for the
        sharded parameter that holds parts of them."""
        before = sharded_param.requires_grad
        toggled = [
            index
            for index in indices
            if any(
                memory.unsharded_params[index].requires_grad is not before
                for memory in self._memories
            )
        ]
        if not toggled:
            return
        if len(toggled) < len(indices):
            raise StateError(
                explain(
                    "requires_grad was changed inside forward for only some of the parameters in a "
                    "FlatParameter.",
                    expected="a change for all parameters of the FlatParameter, or "
                    "use_orig_params=True",
                    got=f"{len(toggled)} of {len(indices)} parameters with "
                    f"requires_grad={not before}",
                    where=where,
                    fix="set requires_grad before wrapping, or pass use_orig_params=True",
                )
            )
        sharded_param.requires_grad_(not before)
