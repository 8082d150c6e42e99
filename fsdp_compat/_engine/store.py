"""The interface between the engine and the layout of parameters, and the tensors of a group.

With ``ranks`` shard ranks, S elements per rank, and P parameters in the group:

    tensor              shape       made and owned by          holds memory
    ------------------  ----------  -------------------------  -------------------------------------
    shard               [S]         store (``new_shard``)      always: pinned memory of the CPU if
                                                               offloaded, shared memory if other
                                                               ranks of the host read it
    sharded parameters  views of    store                      always. The optimizer sees them, and
                        the shard                              ``parameters()`` between steps: one
                                                               flat parameter, or one per original
                                                               parameter
    all_gather_output   [ranks*S]   GroupMemory, one per       from ``start_unshard`` to
                                    dtype computed in          ``reshard``; if parameters do not
                                                               view it, until they are copied out of
                                                               it; always, if mapped
    unsharded           P original  store, kept by             with all_gather_output, which they
    parameters          shapes      GroupMemory                view; otherwise in own storages, from
                                                               the copy to ``reshard``
    .grad of those      P original  autograd                   until ``take`` (large ones, at once)
                        shapes                                 or ``collect`` (in post-backward: the
                                                               others; on a device, all)
    reduce buffer       [ranks*S]   ReduceBuffer               from the first received gradient to
                                                               the end of the reduce-scatter; inside
                                                               no_sync between backwards, too
    reduced gradient    [S]         ReduceBuffer.reduce        while a ``.grad`` views it
    .grad of sharded    views of    ShardedGrads assigns them  until the user sets them to None
    parameters          the above

With one rank that computes in the dtype of the shard, all_gather_output *is* the shard
(``aliased``), and gradients may become ``.grad`` as they are (DirectGradBuffer, which
``Gradients._new_buffer`` chooses). Freeing a tensor empties its storage (storage.Storage): the
tensor object, and what autograd saved of it, stay valid and get memory again with the next
all-gather."""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .. import _torch_private
from .._comm.mesh import Axis
from ..errors import StateError
from .tensor_parallel import TensorParallel


class ShardedParam(typing.NamedTuple):
    """A parameter as the optimizer sees it, and of which unsharded parameters it holds a part."""

    parameter: nn.Parameter
    indices: Sequence[int]


class ModuleSlot(typing.NamedTuple):
    """An attribute of a module and the parameter that it shows there; None: it is absent."""

    module: nn.Module
    attribute: str
    parameter: nn.Parameter | None


class ReduceForm(typing.Protocol):
    """How gradients lie in the reduce buffer ``[ranks * numel]``, rank-major."""

    numel: int
    dtype: torch.dtype  # of the reduced gradients

    @property
    def indices(self) -> list[int]:
        """The parameters in the buffer, ascending."""

    @property
    def is_contiguous_per_param(self) -> bool:
        """True if one view holds each parameter, and ``split`` returns its argument."""

    @property
    def can_pack_grads(self) -> bool:
        """True if ``pack_grads`` is supported."""
        return False

    def param_views(self, buffer: Tensor) -> list[list[Tensor]]:
        """Return disjoint views that cover ``buffer`` [ranks * numel]: for each parameter of the
        store a list, and a last one of the padding."""

    def split(self, index: int, value: Tensor) -> Sequence[Tensor]:
        """value: in the shape of unsharded parameter ``index``, any strides. Return views of it in
        the shapes of ``param_views(...)[index]``."""

    def pack_grads(self, rows: Tensor, grads: list[Tensor], indices: Sequence[int]) -> None:
        """rows: [ranks, numel]. Write the gradients of some of the form's ``indices``, their
        marks, and zeros everywhere else."""
        raise StateError(f"internal: a {type(self).__name__} does not pack gradients")

    def grads(self, total: Tensor) -> Sequence[Tensor | None]:
        """total: [numel]. Return, per sharded parameter, the view that can be its ``.grad``; None
        if it is not in the buffer."""

    def marks(self, rows: Tensor) -> Tensor:
        """rows: [..., numel]. Return the view [..., P], in the padding, of an element per parameter
        of ``indices`` that says whether a rank has its gradient. ``pack_grads`` sets them."""
        raise StateError(f"internal: a {type(self).__name__} has no marks")


class PartialRows(typing.NamedTuple):
    """The rows of unsharded parameters that one of n ranks keeps for backward's all-gather."""

    full: Tensor  # [n * numel], which the rows are all-gathered into
    own_rows: list[Tensor]  # views of this rank's rows of the unsharded parameters
    copies: tuple[list[Tensor], list[Tensor]]  # (to, from): fill these from ``full``
    # Makes parameters of this rank's rows, which modules show meanwhile, over [numel].
    params: Callable[[Tensor], list[nn.Parameter]]


class ParamStore(typing.Protocol):
    """Where each element of a group lies, and which parameters modules and the optimizer see.

    In training a store only returns views, which the engine requests once per buffer and keeps; it
    never sends, allocates, frees, copies or adds. Communication buffers are 1-D ``[ranks * S]``,
    rank-major: segment r belongs to rank r."""

    numel: int  # S, the same on every rank
    dtype: torch.dtype  # of the shard; gathers and reductions may use others
    shard: Tensor  # [S], this rank's part: an all-gather sends it, cast if needed
    # The parameters that the optimizer sees. Unsharded parameters follow their requires_grad.
    sharded_params: Sequence[ShardedParam]
    # True: while sharded, modules show parts of parameters and refuse their own calls and state
    # dicts. False: modules show DTensors, which other code can use.
    is_guarded: bool = True
    # Tensor subclasses all-gather in their own way: the engine calls ``pack`` before each
    # all-gather, and ``unpack`` after its output was copied out.
    has_extension: bool = False

    def pack(self) -> None:
        """Write what this rank sends into the shard."""
        raise StateError(f"internal: a {type(self).__name__} has no extension")

    def unpack(self, unsharded_params: Sequence[nn.Parameter]) -> None:
        """Rebuild the unsharded parameters."""
        raise StateError(f"internal: a {type(self).__name__} has no extension")

    @property
    def tensor_parallel_axes(self) -> Sequence[Axis]:
        """Further mesh axes that every parameter is split over, and norms sum over."""
        return ()

    def make_unsharded_params(self, full: Tensor) -> list[nn.Parameter]:
        """Called once per dtype computed in. full: [ranks * S]."""

    @property
    def params_view_output(self) -> bool:
        """True if all parameters of ``make_unsharded_params`` view ``full``; False if none does."""

    def shown(self, unsharded_params: Sequence[nn.Parameter] | None) -> list[ModuleSlot]:
        """Return the module slots, in one order, with unsharded or (None) sharded parameters."""

    def is_intact(self) -> bool:
        """True if no sharded parameter has been moved away from the shard."""

    def check(self, where: str) -> None:
        """Repair sharded parameters that the user has moved or replaced, or raise StateError."""

    def copies(
        self, full: Tensor, unsharded_params: Sequence[nn.Parameter]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return (to, from): the copies out of ``full`` that fill parameters not viewing it."""
        raise StateError(f"internal: parameters of a {type(self).__name__} view the output")

    def private_memory(self, unsharded_params: Sequence[nn.Parameter]) -> Sequence[Tensor]:
        """Return the tensors that hold the memory of parameters that do not view the output."""
        return unsharded_params

    def reduce_form(self, also: Iterable[int] = ()) -> ReduceForm:
        """Return the form for the gradients of trainable parameters and of ``also``; the same
        object for the same parameters."""

    def partial_rows(
        self, mesh: DeviceMesh, rank: int, ranks: int, unsharded_params: Sequence[nn.Parameter]
    ) -> PartialRows:
        """Return the rows of unsharded parameters, which have memory, that ``rank`` of ``ranks``
        keeps. mesh: 2-D, of which these ranks are the last dimension."""
        raise StateError(f"internal: a {type(self).__name__} keeps no rows after forward")


class ParamKind(typing.NamedTuple):
    """What an unsharded parameter is besides its values."""

    cls: type[nn.Parameter]
    attributes: dict[str, typing.Any]  # shared with the user's parameter
    parallel: TensorParallel | None = None  # of a DTensor, which is an nn.Parameter
    hooks: typing.Any = None  # of the user, on gradients: as with DDP, before their reduction

    def parameter(self, value: Tensor, requires_grad: bool) -> nn.Parameter:
        """Return a parameter over ``value`` with its own version counter. With that of its base, a
        change of an activation would look like one of the weights, and autocast would cache its
        cast across gathers."""
        param = value.data.requires_grad_(requires_grad)
        if self.parallel is None:
            param.__class__ = self.cls
        else:
            param = nn.Parameter(self.parallel.wrap(value.data), requires_grad=requires_grad)
        param.__dict__ = self.attributes
        setattr(param, _torch_private.GRADIENT_HOOKS, self.hooks)
        return typing.cast(nn.Parameter, param)
