"""The flat layout: parameters are concatenated, row-major, and cut into equal intervals."""

from __future__ import annotations

import functools
import typing
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import _torch_private
from .._engine.ownership import OrigParam
from .._engine.state_store import FLAT_PARAM, StateStore
from .._engine.storage import new_shard
from .._engine.store import ModuleSlot, ParamKind, ReduceForm, ShardedParam
from .._engine.tensor_parallel import TensorParallel
from .._engine.user_changes import Addresses
from .._layout.spec import FlatLayout, Section, between
from ..errors import StateError
from .flat_cuts import UnitBlocks, layout_of


class ShardParamInfo(typing.NamedTuple):
    """Where this rank's elements of one parameter lie, with the field names that clients read. All
    but ``in_shard`` are None if the rank holds none."""

    in_shard: bool
    offset_in_shard: int | None = None
    numel_in_shard: int | None = None
    intra_param_start_idx: int | None = None  # in the flattened parameter
    intra_param_end_idx: int | None = None  # inclusive


class FlatParameter(nn.Parameter):
    """This rank's shard of a unit's flattened parameters of one dtype: 1-D, with padding.

    The optimizer updates it."""

    _fsdp_flattened = _is_flat_param = True  # by which clients recognise a FlatParameter
    _layout: FlatLayout
    _rank: int

    def set_layout(self, layout: FlatLayout, rank: int) -> None:
        """Set ``layout`` and ``rank``, which determine the private attributes of clients."""
        self._layout, self._rank = layout, rank

    @property
    def _fqns(self) -> tuple[str, ...]:
        return self._layout.names

    @property
    def _shapes(self) -> tuple[torch.Size, ...]:
        return tuple(torch.Size(param.shape) for param in self._layout.params)

    @property
    def _shard_param_infos(self) -> tuple[ShardParamInfo, ...]:
        infos = []
        for index in range(len(self._layout.params)):
            part = self._layout.part(index, self._rank)
            start = self._layout.part_in_shard(index, self._rank).start
            infos.append(
                ShardParamInfo(True, start, part.numel, part.start, part.stop - 1)
                if part
                else ShardParamInfo(False)
            )
        return tuple(infos)

    @property
    def _local_shard(self) -> Tensor:
        """A second tensor over the same memory, for clients that compare or set it. It stays the
        same object as long as the memory does."""
        kept = self.__dict__.get("_kept_shard")
        if kept is None or kept.data_ptr() != self.data_ptr() or kept.dtype != self.dtype:
            kept = self.__dict__["_kept_shard"] = self.data
        return kept

    @_local_shard.setter
    def _local_shard(self, tensor: Tensor) -> None:
        self.__dict__["_kept_shard"] = tensor


class FlatStore(StateStore, ReduceForm):
    """A group whose unsharded parameters are contiguous views of the all-gather output, and
    gradients laid out in the same way. A copy, by deepcopy or pickle, has a shard of its own and
    refers to the copied modules. (A StateStore and a ReduceForm.)"""

    def __init__(
        self,
        members: Sequence[OrigParam],
        *,
        rank: int,
        ranks: int,
        flat_slot: tuple[nn.Module, str],
        use_orig_params: bool,
        device: torch.device,
        pin: bool = False,
        blocks: UnitBlocks | None = None,
    ) -> None:
        """members: parameters of one dtype, requires_grad and placement, on any device but meta;
        their memory is released. rank, ranks: of the shard axis. flat_slot: (module, attribute) of
        a FlatParameter. device: of the shard; pin: in memory that a GPU can read. blocks: between
        which shards are cut."""
        is_mapped = ranks > 1 and device.type == "cpu" and not pin
        members, self.layout = layout_of(members, ranks, is_mapped, not use_orig_params, blocks)
        originals = [member.parameter for member in members]
        locals_ = [_torch_private.local_part(p.detach()) for p in originals]
        self.dtype = originals[0].dtype
        # Slots and names only: a FlatParameter replaces the parameters themselves.
        self.orig_params = tuple(member.param_slots for member in members)
        self.rank, self.numel = rank, self.layout.shard_numel
        self.parallel = [TensorParallel.of(p) for p in originals]
        # [S], padding zero
        self.shard = new_shard(self.numel, self.dtype, device, ranks=ranks, pin=pin)
        self.take_from_whole(locals_)
        self._flat_slot, self._device, self._pin = flat_slot, device, pin
        # Attributes are shared: one set later on either parameter is seen on both.
        self.kinds = list(map(_kind_of, originals, self.parallel))
        grads = [None if p.grad is None else _torch_private.local_part(p.grad) for p in originals]
        self.is_flattened = not use_orig_params
        if use_orig_params:
            # A DTensor cannot become a view of the shard, so a new parameter of this rank's
            # elements replaces it.
            params = [
                p if parallel is None else nn.Parameter(local, requires_grad=p.requires_grad)
                for p, parallel, local in zip(originals, self.parallel, locals_, strict=True)
            ]
        else:
            # .data: its version counter counts the user's writes, not those of the engine
            params = [FlatParameter(self.shard.data, requires_grad=originals[0].requires_grad)]
        for param in params if originals[0].grad_dtype is not self.dtype else ():
            param.grad_dtype = originals[0].grad_dtype
        self._register(params)
        if any(grad is not None for grad in grads):
            self._keep_gradients(grads)

    def _register(self, params: Sequence[nn.Parameter]) -> None:
        """params: one FlatParameter over the shard; or the user's own, which are moved to it."""
        if self.is_flattened:
            [flat] = params
            flat.__class__ = FlatParameter  # pickle restores it as an nn.Parameter
            typing.cast(FlatParameter, flat).set_layout(self.layout, self.rank)
            self.sharded_params = [ShardedParam(flat, range(len(self.orig_params)))]
        else:
            self.sharded_params = [ShardedParam(p, (index,)) for index, p in enumerate(params)]
            for param, view in zip(params, self.grads(self.shard), strict=True):
                param.grad = None  # its shape no longer fits; see ``_keep_gradients``
                param.data = view
        self._addresses = Addresses(params)

    def _keep_gradients(self, given: Sequence[Tensor | None]) -> None:
        """Keep this rank's part of existing gradients. given: one per parameter, or None."""
        total = torch.zeros_like(self.shard)
        for index, grad in enumerate(given):
            if grad is not None:
                self.own_part(total, index).copy_(self.rows_of_whole(index, grad))
        for (param, indices), grad in zip(self.sharded_params, self.grads(total), strict=True):
            if any(given[index] is not None for index in indices):
                param.grad = grad

    def convert(self, dtype: torch.dtype, device: torch.device) -> None:
        """Move the values to another shard, under the same sharded parameters, and convert
        gradients. Objects that hold the shard or unsharded parameters must get them again. No
        forward may run while the shard is not on its original device."""
        params = [param for param, _ in self.sharded_params]
        grads = [param.grad for param in params]
        for param in params:
            param.grad = None
        on_own_device = device == self._device
        shard = new_shard(
            self.numel,
            dtype,
            device,
            ranks=self.layout.ranks if on_own_device else 1,
            pin=self._pin and on_own_device,
        )
        self.shard, self.dtype = shard.copy_(self.shard.detach()), dtype
        if self.is_flattened:
            params[0].data = self.shard
        self._register(params)
        for param, grad in zip(params, grads, strict=True):
            param.grad = None if grad is None else grad.to(device, dtype)

    # -- the seam

    def make_unsharded_params(self, full: Tensor) -> list[nn.Parameter]:
        return [
            self.parameter(index, self._in(full, index), param.requires_grad)
            for param, indices in self.sharded_params
            for index in indices
        ]

    def _in(self, buffer: Tensor, index: int) -> Tensor:
        param = self.layout.params[index]
        return buffer[param.in_full.slice].view(param.shape)

    @property
    def params_view_output(self) -> bool:
        return True

    def param_views(self, buffer: Tensor) -> list[list[Tensor]]:
        params = [[whole] for whole in self.whole(buffer)]
        return [*params, [buffer[gap.slice] for gap in self.layout.gaps()]]

    @functools.cached_property
    def indices(self) -> list[int]:
        return list(range(len(self.orig_params)))

    def reduce_form(self, also: Iterable[int] = ()) -> FlatStore:
        return self

    @property
    def is_contiguous_per_param(self) -> bool:
        return all(parallel is None for parallel in self.parallel)

    def split(self, index: int, value: Tensor) -> Sequence[Tensor]:
        parallel = self.parallel[index]
        return (value,) if parallel is None else (parallel.local(value),)

    def grads(self, total: Tensor) -> list[Tensor]:
        """total: [S]. Each view is this rank's part: 1-D or, with one rank, in its shape; of blocks
        of rows, these rows."""
        if self.is_flattened:
            return [total]
        sizes, numbers = self._split
        parts = list(map(total.split_with_sizes(sizes).__getitem__, numbers))
        if self._part_shapes is None:
            return parts
        return [part.view(shape) for part, shape in zip(parts, self._part_shapes, strict=True)]

    @functools.cached_property
    def _part_shapes(self) -> list[tuple[int, ...]] | None:
        """The shapes of this rank's parts; None: all are 1-D."""
        shapes = [self.sharded_shape(index, self.rank) for index in self.indices]
        return None if all(len(shape) == 1 for shape in shapes) else shapes

    @functools.cached_property
    def _split(self) -> tuple[list[int], list[int]]:
        """The sizes of a shard's runs, padding included, and the numbers of those of parameters."""
        parts = list(map(self.part_in_shard, range(len(self.orig_params))))
        runs = [*parts, *between(sorted(filter(None, parts)), self.numel)]
        order = sorted(range(len(runs)), key=runs.__getitem__)
        numbers = sorted(range(len(order)), key=order.__getitem__)[: len(parts)]
        return [runs[index].numel for index in order], numbers

    def shown(self, unsharded_params: Sequence[nn.Parameter] | None) -> list[ModuleSlot]:
        params: Sequence[nn.Parameter | None]
        sharded = [param for param, _ in self.sharded_params]
        if not self.is_flattened:
            return self.slots_with(sharded if unsharded_params is None else unsharded_params)
        # Modules show the FlatParameter, or the parameters.
        if unsharded_params is None:
            params, flat = [None] * len(self.orig_params), self.flat_parameter
        else:
            params, flat = unsharded_params, None
        return [*self.slots_with(params), ModuleSlot(*self._flat_slot, flat)]

    def is_intact(self) -> bool:
        return not self._addresses.changed()

    def check(self, where: str) -> None:
        if self.shard.device != self._device:
            raise StateError.of(
                "A shard was moved to another device and not moved back.",
                expected=f"the shard on {self._device}",
                got=f"the shard on {self.shard.device}",
                where=where,
                fix=f"move it back before its use: handle.flat_param_to({str(self._device)!r})",
            )
        if not self.is_intact():
            self._repair(where)

    @torch.no_grad()
    def _repair(self, where: str) -> None:
        """Copy values of sharded parameters that the user moved (``.data =``, ``.to()``) into the
        shard, and let them view it again. Raises StateError for a parameter that does not fit."""
        views = self.grads(self.shard)
        for (sharded, (index, *_)), view in zip(self.sharded_params, views, strict=True):
            data, param = sharded.data, self.layout.params[index]
            name = FLAT_PARAM if self.is_flattened else f"parameter {param.name!r}"
            if not self.is_flattened and data.shape == param.shape != view.shape:
                data = self.rows_of_whole(index, data)  # the user set the whole parameter
            if (data.dtype, data.device, data.numel()) != (view.dtype, view.device, view.numel()):
                raise StateError.of(
                    "A sharded parameter no longer fits its shard.",
                    expected=f"{view.numel()} elements of {view.dtype} on {view.device}",
                    got=f"{data.numel()} elements of {data.dtype} on {data.device}",
                    where=f"{where}, {name}",
                    fix="convert and move the model before it is wrapped; for computing in another "
                    "dtype pass mixed_precision=",
                )
            if data.data_ptr() != view.data_ptr():
                view.copy_(data.reshape(view.shape))
            sharded.data = view

    # -- for state dicts

    def whole(self, full: Tensor) -> list[Tensor]:
        """Return views of the parameters in ``full`` [ranks * S], in their local shapes."""
        return [self._in(full, index) for index in range(len(self.layout.params))]

    @functools.cached_property
    def sections(self) -> Sequence[Section]:
        return (Section(self.layout, 0, 0),)

    def sharded_shape(self, index: int, rank: int) -> tuple[int, ...]:
        if self.is_flattened:
            return (self.layout.shard_numel,)
        if self.layout.ranks == 1:
            return self.layout.params[index].shape
        return self.layout.params[index].part_shape(self.layout.part(index, rank).numel)

    @property
    def flat_parameter(self) -> FlatParameter | None:
        [(param, _), *_] = self.sharded_params
        return typing.cast(FlatParameter, param) if self.is_flattened else None

    # -- copies

    def __getstate__(self) -> dict[str, Any]:
        state = dict(vars(self))
        # They refer to the shard, or to attributes of the parameters.
        for name in ("sharded_params", "_addresses"):
            del state[name]
        if self.is_flattened:
            state["shard"] = None  # an optimizer's copy may hold the FlatParameter as well
        else:
            state |= {"shard": self.shard.detach(), "kinds": None}
        return {**state, "params": [param for param, _ in self.sharded_params]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        params = state["params"]
        vars(self).update({name: value for name, value in state.items() if name != "params"})
        if self.is_flattened:
            self.shard = params[0].data
        else:
            self.kinds = list(map(_kind_of, params, self.parallel))
        with torch.no_grad():
            self._register(params)


def _kind_of(original: nn.Parameter, parallel: TensorParallel | None) -> ParamKind:
    attributes = original.__dict__ if parallel is None else {}
    hooks = getattr(original, _torch_private.GRADIENT_HOOKS)
    setattr(original, _torch_private.GRADIENT_HOOKS, None)  # its gradient is a part from now on
    return ParamKind(type(original), attributes, parallel, hooks)
