"""The row layout: every parameter cut by itself along one dim, shown to the optimizer as a
DTensor.

A rank's segment holds its part of every parameter, each in a slot as large as the first rank's.
Parameters are copied out of the all-gather output, by one strided copy each. A single one that is
cut along its first dim views the output, and so do all with one rank.

    two parameters, a [3, 2] and b [2], on two ranks:    a0 a0 a1 a1 b0 | a2 a2 -- -- b1"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
import typing
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import _torch_private
from .._comm.host_memory import in_whole_pages
from .._engine.dtypes import as_bytes
from .._engine.module_view import values_lost
from .._engine.ownership import OrigParam
from .._engine.state_store import StateStore
from .._engine.storage import new_shard
from .._engine.store import ModuleSlot, ParamKind, PartialRows, ShardedParam
from .._engine.user_changes import Addresses
from .._layout.rows import Cut
from .._layout.spec import FlatLayout, Section, aligned
from .._torch_private import dtensor as torch_dtensor
from ..errors import StateError, UsageError
from .placement import RowParam, RowPlacement, require_one_kind, with_own_storage
from .row_views import RowReduceForm, RowViews, own_rows

ALIGN_NBYTES = 64  # of unsharded parameters in their storage
_requires_grad = operator.attrgetter("requires_grad")


_Store = typing.TypeVar("_Store", bound="RowStore")


class RowStore(StateStore):
    """A group in which each parameter is cut by itself. (A StateStore.) Sharded parameters are
    DTensors (without a spec: plain parameters of rows) whose local tensors view the shard."""

    is_guarded = False

    def __init__(
        self,
        members: Sequence[OrigParam],
        placements: Sequence[RowPlacement],
        *,
        rank: int,
        ranks: int,
        device: torch.device,
        pin: bool = False,
    ) -> None:
        """members: parameters of one dtype, all on the meta device or none. placements: of these.
        rank, ranks: of the shard axis. device: of the shard, unless members are on the meta device;
        pin: in memory that a GPU can read."""
        originals = [member.parameter for member in members]
        values = [_torch_private.local_part(original.detach()) for original in originals]
        self.orig_params = tuple(member.param_slots for member in members)
        self.rank, self._pin = rank, pin
        cuts = [
            Cut(tuple(value.shape), placement.dim, ranks)
            for value, placement in zip(values, placements, strict=True)
        ]
        self._lay_out(cuts, values[0].dtype, torch.device("meta") if values[0].is_meta else device)
        locals_ = [
            self._own_local(index, own_rows(value, cuts[index], rank))
            for index, value in enumerate(values)
        ]
        self._params = list(map(RowParam.of, originals, locals_, cuts, placements))
        self._refresh()

    def _lay_out(self, cuts: Sequence[Cut], dtype: torch.dtype, device: torch.device) -> None:
        ranks, pin = cuts[0].ranks, self._pin and device.type == "cpu"
        self.layout = RowViews.in_order(cuts, ranks, dtype.itemsize)
        # A single parameter is not padded: its rows are contiguous over ranks.
        if len(cuts) > 1 and ranks > 1 and device.type in ("cpu", "meta") and not self._pin:
            numel = in_whole_pages(self.layout.numel, dtype)
            self.layout = dataclasses.replace(self.layout, numel=numel)
        self.numel, self.dtype = self.layout.numel, dtype
        self.shard = new_shard(self.numel, dtype, device, ranks=ranks, pin=pin)  # [S]
        self._kind = dtype, self.shard.device  # of the sharded parameters
        self.__dict__.pop("sections", None)

    def _own_local(self, index: int, value: Tensor) -> Tensor:
        """Copy this rank's rows of a parameter into the shard. Return a tensor over them."""
        local = with_own_storage(self.own_part(self.shard, index))
        if not value.is_meta:
            as_bytes(local).copy_(as_bytes(value))
        return local

    def _refresh(self) -> None:
        """Update what follows from the sharded parameters, which view the shard now."""
        self.kinds = [param.kind for param in self._params]
        self.parallel = [kind.parallel for kind in self.kinds]
        self._sharded = [param.sharded for param in self._params]
        self.sharded_params = [
            ShardedParam(sharded, (index,)) for index, sharded in enumerate(self._sharded)
        ]
        self._forms: dict[tuple[int, ...], RowReduceForm] = {}
        self._addresses = Addresses(self._sharded)

    # -- the seam

    @property
    def params_view_output(self) -> bool:
        return self.layout.ranks == 1 or (
            len(self._params) == 1 and self._params[0].cut.is_contiguous
        )

    def make_unsharded_params(self, full: Tensor) -> list[nn.Parameter]:
        memory, starts = full, self.layout.starts
        if not self.params_view_output:
            memory, starts = self._new_memory(full)
        values = [
            memory[start : start + cut.full_numel].view(cut.shape)
            for cut, start in zip(self.layout.cuts, starts, strict=True)
        ]
        return list(
            map(ParamKind.parameter, self.kinds, values, map(_requires_grad, self._sharded))
        )

    def _new_memory(self, full: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        """Return one buffer for all unsharded parameters, and their starts, with room for padding:
        so each is filled by one copy."""
        unit = max(ALIGN_NBYTES // full.dtype.itemsize, 1)
        starts, end = [], 0
        for cut in self.layout.cuts:
            starts.append(end)
            end = aligned(end + cut.numel * cut.ranks, unit)
        return full.new_empty(max(end, 1)), tuple(starts)

    def copies(
        self, full: Tensor, unsharded_params: Sequence[nn.Parameter]
    ) -> tuple[list[Tensor], list[Tensor]]:
        return self.layout.copies(full, unsharded_params)

    def private_memory(self, unsharded_params: Sequence[nn.Parameter]) -> list[Tensor]:
        return [_torch_private.local_part(unsharded_params[0])]  # one storage for all

    def grads(self, total: Tensor) -> list[Tensor]:
        """total: [S], in the layout of the shard. Return its views by parameter, plain tensors."""
        return self.layout.views(total, self.rank)

    def reduce_form(self, also: Iterable[int] = ()) -> RowReduceForm:
        if all(map(_requires_grad, self._sharded)):
            trainable = tuple(range(len(self._sharded)))
        else:
            flags = map(_requires_grad, self._sharded)
            found = itertools.compress(itertools.count(), flags)
            trainable = tuple(sorted({*found, *also}))
        if trainable not in self._forms:
            dtype, _ = self._kind
            self._forms[trainable] = RowReduceForm(trainable, self._params, self.rank, dtype)
        return self._forms[trainable]

    def partial_rows(
        self, mesh: Any, rank: int, ranks: int, unsharded_params: Sequence[nn.Parameter]
    ) -> PartialRows:
        """mesh: None shows plain tensors. Raises UsageError for tensor-parallel parameters."""
        for param, place in zip(self._params, self.orig_params, strict=True):
            if param.kind.parallel is not None:
                raise UsageError.of(
                    "reshard_after_forward=<int> does not support tensor-parallel parameters.",
                    expected="plain parameters",
                    got=f"a DTensor parameter {place.name!r}",
                    where="fully_shard(reshard_after_forward=...)",
                    fix="pass True or False",
                )
        cuts = [Cut(cut.shape, 0 if cut.shape else None, ranks) for cut in self.layout.cuts]
        dtype, device = unsharded_params[0].dtype, unsharded_params[0].device
        layout = RowViews.in_order(cuts, ranks, dtype.itemsize)
        full = torch.empty(ranks * layout.numel, dtype=dtype, device=device)
        own = [own_rows(p.data, cut, rank) for p, cut in zip(unsharded_params, cuts, strict=True)]
        kinds = [p.kind if mesh is None else p.kind_on(mesh) for p in self._params]

        def params(held: Tensor) -> list[nn.Parameter]:
            flags = map(_requires_grad, self._sharded)
            return list(map(ParamKind.parameter, kinds, layout.views(held, rank), flags))

        return PartialRows(full, own, layout.copies(full, unsharded_params), params)

    def shown(self, unsharded_params: Sequence[nn.Parameter] | None) -> list[ModuleSlot]:
        return self.slots_with(self._sharded if unsharded_params is None else unsharded_params)

    def is_intact(self) -> bool:
        return not self._addresses.changed()

    def check(self, where: str) -> None:
        if not self.is_intact() and self.adopt():
            raise StateError.of(
                "Parameters changed their dtype or device while their model was in use.",
                expected=f"{self.dtype} on {self.shard.device}",
                got="parameters of another dtype or device",
                where=where,
                fix="move or convert between steps, by a method of the module given to fully_shard",
            )

    # -- changes by the user

    def adopt(self) -> bool:
        """Let sharded parameters that were replaced (``assign=True``) or given other memory
        (``to_empty``, ``.to()``) view the shard again, once all have values. Only while modules
        show them.

        Returns True if the group must be rebuilt because its layout, shard or parameters have been
        replaced. Raises StateError, with nothing changed, for parameters that do not fit."""
        present = [member.present() for member in self.orig_params]
        for param, parameter, member in zip(self._params, present, self.orig_params, strict=True):
            param.require_fit(parameter, self.rank, member.name)
        values = [_torch_private.local_part(parameter) for parameter in present]
        on_meta = [i for i, value in enumerate(values) if value.is_meta]
        if on_meta and not self.shard.is_meta:
            name = self.orig_params[on_meta[0]].name
            raise values_lost(name, f"parameter {name!r}")
        if on_meta:
            return False
        require_one_kind(values, [member.name for member in self.orig_params])
        dtype, device = values[0].dtype, values[0].device
        was_replaced = any(map(operator.is_not, present, self._sharded))
        moved = (dtype, device) != self._kind
        with torch.no_grad():
            if moved:
                self._lay_out(self.layout.cuts, dtype, device)
            for index, (parameter, value) in enumerate(zip(present, values, strict=True)):
                self._adopt_param(index, parameter)
                self._move_into_shard(index, value, moved)
        self._refresh()
        return moved or was_replaced

    def take_apart(self, cls: type[_Store], indices: Sequence[int]) -> _Store:
        """Return a store, to ``adopt`` next, for some of the parameters, in place of this one."""
        made = cls.__new__(cls)
        vars(made).update(vars(self))
        made.orig_params = tuple(self.orig_params[index] for index in indices)
        made._params = [self._params[index] for index in indices]
        made._lay_out([param.cut for param in made._params], *self._kind)
        return made

    def _adopt_param(self, index: int, parameter: nn.Parameter) -> None:
        param = self._params[index]
        if param.spec is not None:
            param.spec = torch_dtensor.spec_of(parameter)
        if parameter is not param.sharded or parameter.__dict__ is not param.kind.attributes:
            param.kind.attributes.update(vars(parameter))
            parameter.__dict__ = param.kind.attributes
        param.sharded = parameter
        for module, attribute in self.orig_params[index].slots:
            _torch_private.parameters_of(module)[attribute] = parameter

    def _move_into_shard(self, index: int, value: Tensor, moved: bool) -> None:
        """Let sharded parameter ``index``, whose local tensor is ``value``, view the shard."""
        param = self._params[index]
        own = self.own_part(self.shard, index)
        if not moved and value.data_ptr() == own.data_ptr() and value.is_contiguous():
            return
        local = self._own_local(index, value)
        if param.spec is None:
            param.sharded.data = local
        else:
            torch_dtensor.set_local_part(param.sharded, local)

    # -- for state dicts

    @property
    def ranks(self) -> int:
        return self.layout.ranks

    @functools.cached_property
    def sections(self) -> Sequence[Section]:
        """One per parameter."""
        return [
            self.layout.section(index, place.name, self.rank)
            for index, place in enumerate(self.orig_params)
        ]

    def cut(self, index: int) -> tuple[FlatLayout, int]:
        """Raises UsageError for a parameter whose parts are not runs of its elements."""
        if self.sections[index].offsets is not None:
            cut = self.layout.cuts[index]
            raise UsageError.of(
                "This call only supports parameters cut along their first dim.",
                expected="Shard(0), or None, from shard_placement_fn",
                got=f"Shard({cut.dim}) for a parameter of shape {cut.shape}",
                where=f"parameter {self.orig_params[index].name!r}",
                fix="save with fsdp_compat.checkpoint, or model.state_dict()",
            )
        return super().cut(index)

    def local_shape(self, index: int) -> tuple[int, ...]:
        return self.layout.cuts[index].shape

    def sharded_shape(self, index: int, rank: int) -> tuple[int, ...]:
        return self.layout.cuts[index].part_shape(rank)

    def whole(self, full: Tensor) -> list[Tensor]:
        return [self.layout.whole(full, index) for index in range(len(self._params))]

    def rows_of_whole(self, index: int, whole: Tensor, rank: int | None = None) -> Tensor:
        rank = self.rank if rank is None else rank
        return own_rows(whole.detach(), self.layout.cuts[index], rank)

    def own_part(self, buffer: Tensor, index: int) -> Tensor:
        return self.layout.view(buffer, index, self.rank)
