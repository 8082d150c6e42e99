"""The flat layout: the parameters one after the other, row-major, the whole cut into equal intervals."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from .._engine.store import Shown, Target, as_leaf
from .._engine.tree import Member
from .._layout.flat import flat_layout
from .._layout.spec import FlatLayout
from .._layout.transfer import pieces_of_rank, pieces_of_whole, plan_moves
from .registration import FLAT_PARAM, FlatParameter, FlatRegistration, OriginalRegistration, Registration

__all__ = ["FlatStore"]

ALIGN_NBYTES = 16  # every parameter and every shard starts at a multiple of it


class FlatStore:
    """A group whose leaves are contiguous pieces of the gathered buffer: showing them copies nothing. (A ParamStore.)"""

    def __init__(
        self,
        members: Sequence[Member],
        *,
        rank: int,
        ranks: int,
        home: tuple[nn.Module, str],
        use_orig_params: bool,
        device: torch.device,
    ) -> None:
        """members: parameters of one dtype and requires_grad, on any device that is not meta; their memory is let go.

        rank, ranks: of the shard axis. home: (module, attribute) where a FlatParameter is registered.
        """
        originals = [member.parameter for member in members]
        self.dtype = originals[0].dtype
        self.members = tuple(member.place for member in members)  # not the parameters: what is flat has no use for them any more
        shapes, names = [tuple(p.shape) for p in originals], [member.name for member in self.members]
        align = max(ALIGN_NBYTES // self.dtype.itemsize, 1)
        self.layout: FlatLayout = flat_layout(names, shapes, ranks=ranks, align=align)
        self.rank, self.numel = rank, self.layout.shard_numel
        self._from_whole = plan_moves(pieces_of_whole([self.layout]), pieces_of_rank([self.layout], rank))
        self.shard = torch.zeros(self.numel, dtype=self.dtype, device=device)  # [S], padding zero
        self.take_from_whole(originals)
        self._trainable = [p.requires_grad for p in originals]
        self._leaves: list[nn.Parameter] = []
        grads = [p.grad for p in originals]
        slots = [member.slots for member in self.members]
        self.registration: Registration
        if use_orig_params:
            self.registration = OriginalRegistration(self.shard, self.layout, rank, originals, slots)
        else:
            flat_slots = [slot for its_slots in slots for slot in its_slots]
            self.registration = FlatRegistration(self.shard, self.layout, flat_slots, home, self._trainable[0])
        self.targets: Sequence[Target] = self.registration.targets
        if any(grad is not None for grad in grads):
            self._keep_gradients(
                [torch.zeros(s, dtype=self.dtype, device=device) if g is None else g for g, s in zip(grads, shapes, strict=True)],
                grads,
            )

    def _keep_gradients(self, wholes: Sequence[torch.Tensor], given: Sequence[torch.Tensor | None]) -> None:
        """This rank's part of gradients that were there before. given: per parameter, None where there was none."""
        total = torch.zeros_like(self.shard)
        self.take_from_whole(wholes, total)
        for (target, indices), grad in zip(self.targets, self.grads(total), strict=True):
            target.grad = grad if any(given[index] is not None for index in indices) else None

    def take_from_whole(self, wholes: Sequence[torch.Tensor], shard: torch.Tensor | None = None) -> None:
        """Copy this rank's part of every whole tensor (one per parameter, in its shape, on any device) into ``shard`` [S].

        Default: this rank's own.
        """
        shard = self.shard if shard is None else shard
        for move in self._from_whole:
            target = shard[move.target_start : move.target_start + move.numel]
            source = wholes[move.source[0]].detach().reshape(-1)[move.source_start : move.source_start + move.numel]
            if source.data_ptr() != target.data_ptr():
                target.copy_(source)

    # -- the seam

    def outgoing(self, dtype: torch.dtype) -> torch.Tensor:
        return self.shard if dtype == self.dtype else self.shard.to(dtype)

    def make_leaves(self, full: torch.Tensor) -> list[nn.Parameter]:
        self._leaves = [as_leaf(places[0], wanted) for places, wanted in zip(self.places(full), self._trainable, strict=False)]
        return self._leaves

    def places(self, buffer: torch.Tensor) -> list[list[torch.Tensor]]:
        pieces = [[buffer[param.place.slice].view(param.shape)] for param in self.layout.params]
        return [*pieces, [buffer[gap.slice] for gap in self.layout.gaps()]]

    def split(self, index: int, value: torch.Tensor) -> Sequence[torch.Tensor]:
        return (value,)

    def grads(self, total: torch.Tensor) -> list[torch.Tensor]:
        return self.registration.grads(total)

    def shown(self, full: bool) -> list[Shown]:
        if not full:
            return self.registration.shown_sharded()
        leaves = [
            Shown(module, name, leaf)
            for member, leaf in zip(self.members, self._leaves, strict=True)
            for module, name in member.slots
        ]
        return leaves + self.registration.hidden_when_full()

    def check(self, where: str) -> None:
        self.registration.check(self.shard, where)

    # -- for state dicts

    def whole(self, full: torch.Tensor) -> list[torch.Tensor]:
        """full: [ranks * S], of any dtype. Return the parameters in it, in their shapes: views."""
        return [full[param.place.slice].view(param.shape) for param in self.layout.params]

    @property
    def flat_parameter(self) -> FlatParameter | None:
        parameter = self.targets[0].parameter if self.targets else None
        return parameter if isinstance(parameter, FlatParameter) else None


def home_attribute(index: int) -> str:
    """Return the attribute of a unit's ``index``-th FlatParameter; the first has torch's name."""
    return FLAT_PARAM if index == 0 else f"{FLAT_PARAM}_{index}"
