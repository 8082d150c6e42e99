"""Tensor subclasses that all-gather in their own way: the tensors that ``fsdp_pre_all_gather``
returns are all-gathered, and ``fsdp_post_all_gather`` builds the unsharded parameter from them."""

from __future__ import annotations

import inspect
import itertools
import operator
import typing
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import _torch_private
from .._engine.dtypes import as_bytes
from .._engine.ownership import OrigParam
from .._engine.storage import new_shard
from .._layout.rows import Cut
from .._layout.spec import aligned, row_major_strides
from ..errors import (
    AssertedUsageError,
    NotImplementedUsageError,
    StateError,
    TypeUsageError,
    UsageError,
)
from .placement import RowPlacement
from .row_store import RowStore
from .row_views import RowViews

_BEFORE, _AFTER = "fsdp_pre_all_gather", "fsdp_post_all_gather"
ALIGN_NBYTES = 16  # of a segment, so that values of every dtype are aligned in all of them


def has_extension(parameter: Tensor) -> bool:
    """True if a parameter, or the local tensor of a DTensor, all-gathers in its own way: not if the
    class has no ``__torch_dispatch__``, or if the methods are attributes of the whole parameter,
    which its parts lack, as in torch's FSDP2."""
    local = _torch_private.local_part(parameter)
    return hasattr(local, _BEFORE) and (
        _keeps_class(local) or (local is not parameter and _BEFORE in vars(local))
    )


def _keeps_class(tensor: Tensor) -> bool:
    """True if operations on a tensor return tensors of its class."""
    return type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__


class Context(typing.NamedTuple):
    """What is passed to the two methods, besides their parameter."""

    mesh: Any  # the 1-D DeviceMesh of the shard ranks
    policy: Any  # the mixed-precision policy
    device: torch.device  # the computing device
    dtype: torch.dtype | None  # of unsharded parameters, by the policy


class _Input(typing.NamedTuple):
    size: torch.Size
    dtype: torch.dtype
    start: int  # in the segment, in bytes

    @property
    def stop(self) -> int:
        return self.start + self.size.numel() * self.dtype.itemsize

    def in_segments(self, segments: Tensor) -> Tensor:
        """segments: uint8 [..., S]. Return the elements in each, [..., numel]."""
        return segments[..., self.start : self.stop].view(self.dtype)


class ExtensionStore(RowStore):
    """A group of tensor subclasses with ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``.

    The local tensors of the sharded parameters have memory of their own. The shard is a torch.uint8
    tensor, filled with what the subclasses send before each all-gather."""

    has_extension = True

    def __init__(
        self,
        members: Sequence[OrigParam],
        placements: Sequence[RowPlacement],
        *,
        rank: int,
        ranks: int,
        device: torch.device,
        context: Context,
    ) -> None:
        """device: of the sharded parameters. Raises UsageError for parameters that cannot be padded
        or lack the second method."""
        for member, placement in zip(members, placements, strict=True):
            local = _torch_private.local_part(member.parameter)
            _require_extension(local, Cut(tuple(local.shape), placement.dim, ranks), member.name)
        self._context = context
        super().__init__(members, placements, rank=rank, ranks=ranks, device=device)

    @classmethod
    def of(cls, store: RowStore, indices: Sequence[int], context: Context) -> ExtensionStore:
        """Return a store, to ``adopt`` next, for parameters that have since got the methods."""
        made = store.take_apart(cls, indices)
        for place, cut in zip(made.orig_params, made.layout.cuts, strict=True):
            _require_extension(_torch_private.local_part(place.present()), cut, place.name)
        made._context = context
        return made

    def _lay_out(self, cuts: Sequence[Cut], dtype: torch.dtype, device: torch.device) -> None:
        self.layout = RowViews.in_order(cuts, cuts[0].ranks, dtype.itemsize)
        self.dtype, self._kind = torch.uint8, (dtype, device)
        self.shard, self.numel = torch.zeros(1, dtype=torch.uint8, device=device), 1

    def _own_local(self, index: int, value: Tensor) -> Tensor:
        return value.new_zeros(value.shape).copy_(value)

    def _move_into_shard(self, index: int, value: Tensor, moved: bool) -> None:
        pass  # it has memory of its own

    def _refresh(self) -> None:
        super()._refresh()
        self._locals = list(map(_torch_private.local_part, self._sharded))
        self._outputs: list[list[Tensor]] = []  # 1-D, by parameter
        self._inner: list[Tensor] = []  # of the unsharded parameters
        if self._kind[1].type == "meta":
            return
        sent = list(map(self._before, range(len(self._params))))
        self._metadata = [metadata for _, metadata in sent]
        self._inputs, self.numel = _laid_out([tensors for tensors, _ in sent])
        devices = (tensor.device for tensors, _ in sent for tensor in tensors)
        device = next(devices, self._context.device)
        self.shard = new_shard(self.numel, torch.uint8, device, ranks=self.ranks, pin=False)

    # -- the two methods of the local tensors

    @torch.no_grad()
    def _before(self, index: int) -> tuple[list[Tensor], Any]:
        mesh, policy, device, _ = self._context
        place, cut = self.orig_params[index], self._params[index].cut
        local = _torch_private.local_part(self._sharded[index])
        if local.device != device:
            local = local.to(device, non_blocking=True)
        if not cut.is_even and _keeps_class(local):
            local = _padded(local, cut)
        hook = local.fsdp_pre_all_gather  # type: ignore[attr-defined]
        if len(inspect.signature(hook).parameters) == 1:
            tensors, metadata = hook(mesh)
        else:
            shape = torch.Size(cut.shape)
            module = place.slots[0][0]
            tensors, metadata = hook(mesh, shape, row_major_strides(shape), module, policy)
        if local.numel() < cut.numel and any(each.shape[:1] != (cut.chunk,) for each in tensors):
            raise AssertedUsageError.of(
                "fsdp_pre_all_gather returned tensors without padding for an uneven cut.",
                expected=f"tensors whose first dim is that of the first rank, {cut.chunk}",
                got=_described([(each.size(), each.dtype) for each in tensors]),
                where=f"parameter {place.name!r}, of which this rank holds {tuple(local.shape)}",
                fix="pad the tensors that fsdp_pre_all_gather returns",
            )
        return list(tensors), metadata

    def _after(self, index: int, out: Tensor | None) -> Any:
        """Call fsdp_post_all_gather, which fills ``out`` or, for None, returns a new tensor."""
        outputs = tuple(
            output.view(self.ranks * each.size[0], *each.size[1:]) if each.size else output
            for output, each in zip(self._outputs[index], self._inputs[index], strict=True)
        )
        arguments = outputs, self._metadata[index], self._context.dtype or self._kind[0]
        local: Any = _torch_private.local_part(self._sharded[index])
        hook = local.fsdp_post_all_gather
        return hook(*arguments) if out is None else hook(*arguments, out=out)

    @torch.no_grad()
    def _made_of_zeros(self, index: int, device: torch.device) -> Tensor:
        """Return an unsharded tensor built from zeros, whose memory is filled later."""
        cut = self._params[index].cut
        self._outputs.append(
            [
                torch.zeros(self.ranks * each.size.numel(), dtype=each.dtype, device=device)
                for each in self._inputs[index]
            ]
        )
        result = self._after(index, None)
        got = f"a {type(result).__name__}"
        if isinstance(result, tuple) and len(result) == 2:
            value, inner = result
            self._inner += list(inner)
            if value.dim() and value.shape[0] == cut.chunk * cut.ranks:
                value = value.narrow(0, 0, cut.shape[0])  # without the padding of the last ranks
            if tuple(value.shape) == cut.shape:
                return typing.cast(Tensor, value)
            got = f"a tensor of shape {tuple(value.shape)}"
        raise TypeUsageError.of(
            "fsdp_post_all_gather must return (parameter, inner tensors).",
            expected=f"(a tensor of shape {cut.shape}, the tensors whose memory it uses)",
            got=got,
            where=f"parameter {self.orig_params[index].name!r}",
            fix="return both when out= is None",
        )

    # -- the seam

    @torch.no_grad()
    def pack(self) -> None:
        to: list[Tensor] = []
        sources: list[Tensor] = []
        for index, inputs in enumerate(self._inputs):
            tensors, self._metadata[index] = self._before(index)
            wanted = [(each.size, each.dtype) for each in inputs]
            found = [(tensor.size(), tensor.dtype) for tensor in tensors]
            if found != wanted:
                raise StateError.of(
                    "fsdp_pre_all_gather returned different tensors than before.",
                    expected=_described(wanted),
                    got=_described(found),
                    where=f"parameter {self.orig_params[index].name!r}",
                    fix="return tensors of the same number, shapes and dtypes each time; put "
                    "anything else into the metadata",
                )
            to += [as_bytes(each.in_segments(self.shard)) for each in inputs]
            sources += [as_bytes(tensor.reshape(-1)) for tensor in tensors]
        _torch_private.copy_together(to, sources)

    @torch.no_grad()
    def unpack(self, unsharded_params: Sequence[nn.Parameter]) -> None:
        outs = [_torch_private.local_part(param) for param in unsharded_params]
        with _torch_private.keeping_versions(outs):
            for index, out in enumerate(outs):
                self._after(index, out)

    @property
    def params_view_output(self) -> bool:
        return False

    def make_unsharded_params(self, full: Tensor) -> list[nn.Parameter]:
        self._outputs, self._inner, found = [], [], []
        for index, (sharded, parallel) in enumerate(zip(self._sharded, self.parallel, strict=True)):
            value = self._made_of_zeros(index, full.device)
            if parallel is not None:
                value = parallel.wrap(value)
            param = nn.Parameter(value, requires_grad=sharded.requires_grad)
            # A subclass may keep state in attributes.
            vars(param).update({k: v for k, v in vars(sharded).items() if k not in vars(param)})
            found.append(param)
        return found

    def copies(
        self, full: Tensor, unsharded_params: Sequence[nn.Parameter]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The copies fill the outputs, from which ``unpack`` builds the unsharded parameters."""
        segments = full.view(self.ranks, -1)
        pairs = [
            (as_bytes(output.view(self.ranks, -1)), as_bytes(each.in_segments(segments)))
            for inputs, outputs in zip(self._inputs, self._outputs, strict=True)
            for each, output in zip(inputs, outputs, strict=True)
        ]
        return [to for to, _ in pairs], [source for _, source in pairs]

    def private_memory(self, unsharded_params: Sequence[nn.Parameter]) -> list[Tensor]:
        """The outputs passed to the subclass, and the inner tensors that it has made."""
        return [*itertools.chain(*self._outputs), *self._inner]

    def partial_rows(self, *_: Any) -> typing.NoReturn:
        raise NotImplementedUsageError.of(
            "reshard_after_forward=<int> does not support tensors with fsdp_pre_all_gather.",
            expected="plain parameters",
            got=f"parameter {self.orig_params[0].name!r}",
            where="fully_shard(reshard_after_forward=...)",
            fix="pass True or False",
        )

    def is_intact(self) -> bool:
        return all(map(operator.is_, map(_torch_private.local_part, self._sharded), self._locals))

    # -- for state dicts

    @property
    def sections(self) -> typing.NoReturn:
        raise UsageError.of(
            "This kind of checkpoint does not support tensor subclasses with fsdp_pre_all_gather.",
            expected="plain parameters",
            got=f"parameter {self.orig_params[0].name!r}",
            where="the checkpoint of a model with fully_shard",
            fix="save model.state_dict() with torch.distributed.checkpoint",
        )


def _require_extension(local: Tensor, cut: Cut, name: str) -> None:
    if not hasattr(local, _AFTER):
        raise AssertedUsageError.of(
            "A tensor subclass has only one of the two methods of an all-gather.",
            expected="fsdp_pre_all_gather and fsdp_post_all_gather",
            got=f"{type(local).__name__} without fsdp_post_all_gather",
            where=f"parameter {name!r}",
            fix="define both",
        )
    if not cut.numel or cut.dim is None or (cut.dim and not cut.is_even):
        raise NotImplementedUsageError.of(
            "A tensor subclass with fsdp_pre_all_gather cannot be cut like this.",
            expected=f"a dim 0, or another one whose size is a multiple of {cut.ranks} ranks",
            got=f"shape {cut.shape}",
            where=f"parameter {name!r}",
            fix="pad the parameter, pass another dim by shard_placement_fn, or list the "
            "parameter in ignored_params",
        )


def _padded(local: Tensor, cut: Cut) -> Tensor:
    """Return this rank's rows, padded with zeros to the number that the first rank has."""
    if local.shape[0] == cut.chunk:
        return local
    padded = local.new_zeros((cut.chunk, *cut.tail))
    if local.shape[0]:
        padded.narrow(0, 0, local.shape[0]).copy_(local)
    return padded


def _laid_out(sent: Sequence[Sequence[Tensor]]) -> tuple[list[list[_Input]], int]:
    """sent: by parameter. Return where the tensors lie in a segment of bytes, and its size."""
    inputs, end = list[list[_Input]](), 0
    for tensors in sent:
        inputs.append([])
        for tensor in tensors:
            start = aligned(end, tensor.dtype.itemsize)
            inputs[-1].append(_Input(tensor.size(), tensor.dtype, start))
            end = inputs[-1][-1].stop
    return inputs, aligned(max(end, 1), ALIGN_NBYTES)


def _described(tensors: Sequence[tuple[torch.Size, torch.dtype]]) -> str:
    return ", ".join(f"{dtype} {tuple(size)}" for size, dtype in tensors) or "nothing"
