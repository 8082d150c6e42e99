"""Units: groups that are gathered, shown, reduced and freed together, and what memory each of them
holds now."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import itertools
import operator
import typing
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import nn

from .. import _torch_private
from .._comm.communicator import Communicator, Handle, communicator
from .._comm.mesh import Mesh
from ..errors import AssertedStateError, StateError, explain
from .buffers import CastBuffers
from .bulk_dict import BulkDict, DictEntry, exhaust, swap_of
from .device import offload_policy
from .dtypes import Precision
from .placeholders import Placeholders
from .reduce import (
    CommHook,
    DirectGradBuffer,
    GradBuffer,
    ReduceBuffer,
    ReducePlan,
    Reduction,
    predivisor,
)
from .storage import GroupMemory
from .store import ModuleSlot, ParamStore, ShardedParam

if typing.TYPE_CHECKING:
    from .runtime import Runtime

__all__ = ["LARGE", "MARKS", "Call", "Group", "Residency", "Unit", "UnitOptions", "Uninitialised"]

MARKS = (
    "_is_fsdp_managed_module",
    "_fsdp_use_orig_params",
)  # that front ends put on modules, in front of what these have
LARGE = (
    65536  # elements; gradients below are moved together when the unit is left, without a hook each
)


class Residency(enum.Enum):
    """What memory the groups of a unit hold."""

    SHARDED = enum.auto()  # holds: own shard
    UNSHARDING = enum.auto()  # holds: own shard + full buffer, not readable yet
    UNSHARDED = enum.auto()  # holds: own shard + full form, readable

    __hash__ = (
        object.__hash__
    )  # that of enum.Enum is a function of Python, and moves are looked up several times a step


_MOVES: dict[Residency, tuple[Residency, ...]] = {
    Residency.SHARDED: (Residency.UNSHARDING,),
    Residency.UNSHARDING: (
        Residency.UNSHARDED,
        Residency.SHARDED,
    ),  # sharded: gathered on a wrong guess, or an exception came
    Residency.UNSHARDED: (Residency.SHARDED,),
}


@dataclasses.dataclass(frozen=True)
class UnitOptions:
    """What one unit was asked to do, resolved."""

    reshard_after_forward: bool
    cast_inputs: bool  # floating-point inputs of forward are cast to `compute_dtype`
    cast_root_inputs: bool  # the same, for the unit that a forward begins with
    compute_dtype: torch.dtype
    device: torch.device
    full_precision_in_eval: bool = (
        False  # modules in evaluation mode compute in the dtype of the shard
    )


@dataclasses.dataclass(frozen=True)
class Unreduced:
    """A target after a backward without communication: how its gradient was when it was left."""

    grad: torch.Tensor
    version: int
    nonzero: torch.Tensor  # bool, 0-d: read only when somebody has written the gradient since


class Zeroed(enum.Enum):
    """What happened to a noted gradient before the next backward."""

    NO = enum.auto()  # untouched, or changed to something that is not zero
    YES = enum.auto()  # replaced or set to None, or it was something and is zero
    UNCLEAR = enum.auto()  # written to; it was zero (or empty) and still is


class Group:
    """The engine's half of one store: which of its memory is there, what travels, which gradients
    have come. It knows no layout."""

    def __init__(
        self,
        store: ParamStore,
        mesh: Mesh,
        precision: Precision,
        device: torch.device,
        offload: bool = False,
        streamed: bool = True,
    ) -> None:
        """Collective over the mesh, once per process group (see ``communicator``). offload: the
        shard is on the CPU. streamed: the gradients of large leaves move on as they come."""
        self.limit_in_flight: Callable[[], None] = (
            _nothing  # before memory is taken for gradients; the runtime sets it
        )
        self.call_it("")
        self.store, self.precision, self.device = store, precision, device
        self.shard: Communicator = communicator(mesh.shard, device)
        self.replica: Communicator = communicator(mesh.replica, device)
        self.tensor_parallel = [
            communicator(axis, device) for axis in store.tensor_parallel_axes if axis.ranks > 1
        ]
        self.home = offload_policy(device, offload)
        self.memories = [  # one per dtype computed in: see `use`
            GroupMemory(store, mesh.shard.ranks, dtype, device, self.home.is_offloaded)
            for dtype in dict.fromkeys((precision.gather, precision.evaluate or precision.gather))
        ]
        self.memory = self.memories[0]
        self._unsharded_params = [
            (index, unsharded_param)
            for memory in self.memories
            for index, unsharded_param in enumerate(memory.unsharded_params)
        ]
        self._streamed = streamed
        self._small = [
            (index, unsharded_param)
            for index, unsharded_param in self._unsharded_params
            if not self._is_large(unsharded_param)
        ]
        self._small_indices, self.small_params = (
            [index for index, _ in self._small],
            [unsharded_param for _, unsharded_param in self._small],
        )
        self._no_gradients = [None] * len(self._small)
        self.all_unsharded_params = [
            unsharded_param for _, unsharded_param in self._unsharded_params
        ]
        self._sharded_params = [sharded_param for sharded_param, _ in store.sharded_params]
        # Targets of which this rank has no part, so that they never have gradients here, and
        # optimizers keep nothing for them.
        self._vacant = frozenset(
            n
            for n, sharded_param in enumerate(store.sharded_params)
            if self._is_vacant(sharded_param)
        )
        self.num_held = len(self._sharded_params) - len(
            self._vacant
        )  # targets that this rank has a part of
        self._tag = self.shard.new_tag()
        grad_dtype = precision.grad if precision.grad not in (None, store.dtype) else None
        if grad_dtype is not None:
            for sharded_param, _ in store.sharded_params:
                grad, sharded_param.grad = sharded_param.grad, None  # it may have one from before
                sharded_param.grad_dtype = grad_dtype
                sharded_param.grad = None if grad is None else grad.to(grad_dtype)
        self._wire = ReducePlan(
            self.shard,
            self.replica,
            self._tag,
            self.replica.new_tag(),
            self.home,
            predivisor(mesh.ranks, precision.reduce),
            grad_dtype=grad_dtype,
            one_group=mesh.one_group,
        )
        self._hooked: set[nn.Parameter] = set()
        self._wanted = [
            sharded_param.requires_grad for sharded_param, _ in store.sharded_params
        ]  # as the leaves were last told
        self._gathering: Handle | None = None
        self._collected: GradBuffer | None = (
            None  # made when the first gradient comes: frozen groups never have one
        )
        self.filled: Collection[int] = ()  # leaves whose gradients have been collected
        self._unreduced: list[Unreduced | None] = []
        self.reduction: Reduction | None = None

    def call_it(self, name: str) -> None:
        """name: of its unit, for errors."""
        self.name, self._parameters_text, self._gradients_text = (
            name,
            f"the parameters of {name}",
            f"the gradients of {name}",
        )

    def _is_large(self, unsharded_param: nn.Parameter) -> bool:
        """True for a leaf with a hook of its own. Those of other tensor types are collected with
        the small ones."""
        return (
            self._streamed
            and unsharded_param.numel() >= LARGE
            and _torch_private.is_plain(unsharded_param)
        )

    def _is_vacant(self, sharded_param: ShardedParam) -> bool:
        unsharded_params = self.memories[0].unsharded_params
        return not sharded_param.parameter.numel() and any(
            unsharded_params[index].numel() for index in sharded_param.unsharded_params
        )

    # -- parameters

    @property
    def unsharded_params(self) -> list[nn.Parameter]:
        """The whole parameters that modules show in the present form."""
        return self.memory.unsharded_params

    def use(self, form: int) -> None:
        """Compute in the first dtype, or, where there is a second one for evaluation, in that. Only
        while nothing is gathered."""
        self.memory = self.memories[min(form, len(self.memories) - 1)]

    def gather(self) -> None:
        memory = self.memory
        if memory.aliased:
            return
        memory.allocate()
        self._gathering = self.shard.begin_gather(
            self.store.shard, memory.full, memory.segments, self._tag
        )
        if self.home.is_offloaded:
            self.home.was_read()

    def wait(self) -> None:
        """Make the leaves readable."""
        if self._gathering is not None:
            self._arrive()
        if self.memory.has_copies:
            self.memory.fill_unsharded_params()

    def free(self) -> None:
        if self._gathering is None:
            self._gathering = self.shard.unfinished_gather(
                self._tag
            )  # by an exception, before it was noted here
        if self._gathering is not None and not self.shard.has_failed:
            self._arrive()  # memory that is being received into cannot be freed
        self._gathering = None
        self.memory.free()

    def gather_full(self, own: torch.Tensor | None = None) -> torch.Tensor:
        """Return [ranks * S] from every rank's ``own`` [S], by default the shard: memory of its
        own, unless there is one rank.

        Collective. It does not touch what the group holds for forward and backward.
        """
        return self.shard.gather_now(self.home.to_compute(self.store.shard if own is None else own))

    def _arrive(self) -> None:
        assert self._gathering is not None
        self.shard.end_gather(self._gathering, self._parameters_text)
        self._gathering = None  # not before: what has not arrived is still received

    def follow_requires_grad(self) -> list[tuple[int, nn.Parameter]]:
        """Honour toggles on what the optimizer sees. Returns the large leaves, with their indices,
        that are trainable for the first time: they need a hook."""
        for position, (sharded_param, indices) in enumerate(self.store.sharded_params):
            if sharded_param.requires_grad is self._wanted[position]:
                self._follow_unsharded_params(sharded_param, indices)
            self._wanted[position] = sharded_param.requires_grad
        found = []
        for memory in self.memories:
            unsharded_params = memory.unsharded_params
            for sharded_param, indices in self.store.sharded_params:
                wanted = sharded_param.requires_grad
                for index in indices:
                    unsharded_param = unsharded_params[index]
                    if unsharded_param.requires_grad is not wanted:
                        unsharded_param.requires_grad_(wanted)
                    if (
                        wanted
                        and unsharded_param not in self._hooked
                        and self._is_large(unsharded_param)
                    ):
                        self._hooked.add(unsharded_param)
                        found.append((index, unsharded_param))
        return found

    def _follow_unsharded_params(self, sharded_param: nn.Parameter, indices: Sequence[int]) -> None:
        """Somebody may have toggled a whole parameter inside of forward: that counts for what it is
        a part of."""
        known = sharded_param.requires_grad
        toggled = [
            index
            for index in indices
            if any(
                memory.unsharded_params[index].requires_grad is not known
                for memory in self.memories
            )
        ]
        if not toggled:
            return
        if len(toggled) < len(indices):
            raise StateError(
                explain(
                    "requires_grad was changed inside of forward for some of the parameters that "
                    "are flattened together.",
                    expected="a change for all parameters of the FlatParameter, or "
                    "use_orig_params=True",
                    got=f"{len(toggled)} of {len(indices)} parameters with "
                    f"requires_grad={not known}",
                    where=self.name,
                    fix="set requires_grad before wrapping, or pass use_orig_params=True",
                )
            )
        sharded_param.requires_grad_(not known)

    # -- gradients

    @property
    def has_gradients(self) -> bool:
        return bool(self.filled)

    def lacks_no_gradient(self) -> bool:
        """True if the gradients of all trainable leaves have come."""
        filled = self.filled
        return all(
            not unsharded_param.requires_grad or unsharded_param.grad is not None or index in filled
            for index, unsharded_param in enumerate(self.unsharded_params)
        )

    @property
    def resident_nbytes(self) -> int:
        """Bytes beyond shard, gradients and optimizer state that are held now."""
        held = sum(memory.resident_nbytes for memory in self.memories)
        return held + (self._collected.resident_nbytes if self._collected is not None else 0)

    @property
    def grad_dtype(self) -> torch.dtype:
        """What gradients have when they are reduced."""
        return self._wire.grad_dtype or self.store.dtype

    @property
    def hook(self) -> CommHook | None:
        return self._wire.hook

    def set_hook(self, hook: CommHook) -> None:
        """Sum and average gradients in the user's way from now on. Not while gradients are being
        collected."""
        self._wire = dataclasses.replace(self._wire, hook=hook, predivisor=1.0)
        self._collected, self.filled = None, ()  # made anew: without division on the way in

    def take(self, index: int, unsharded_param: nn.Parameter) -> None:
        """Move one large leaf's gradient to where they collect."""
        grad, unsharded_param.grad = unsharded_param.grad, None
        if grad is not None:  # a hook may fire without a gradient
            self._put([index], [grad])

    def collect(self) -> None:
        """Move the gradients of the small leaves, which autograd has left in ``.grad``."""
        grads, indices = list(map(_grad, self.small_params)), self._small_indices
        if not any(map(operator.is_not, grads, self._no_gradients)):
            return
        if any(map(operator.is_, grads, self._no_gradients)):
            indices = [
                index for index, grad in zip(indices, grads, strict=True) if grad is not None
            ]
            grads = [grad for grad in grads if grad is not None]
        for unsharded_param in self.small_params:
            unsharded_param.grad = None
        self._put(indices, grads)

    def _put(self, indices: list[int], grads: list[torch.Tensor]) -> None:
        if not self.filled:
            self.limit_in_flight()
        if self.reduction is not None:  # the buffer still travels
            self.finish_reduction()
        if self._collected is None:
            self._collected = self._make_collected()
            self.filled = self._collected.filled
        if any(map(_is_sparse, grads)) or any(
            map(_requires_grad, grads)
        ):  # the latter with create_graph
            grads = [grad.to_dense() if grad.is_sparse else grad.detach() for grad in grads]
        self._collected.put(indices, grads)

    def _make_collected(self) -> GradBuffer:
        wire = self._wire
        whole = all(
            len(sharded_param.unsharded_params) == 1
            and sharded_param.parameter.shape
            == self.unsharded_params[sharded_param.unsharded_params[0]].shape
            and _torch_private.is_plain(self.unsharded_params[sharded_param.unsharded_params[0]])
            for sharded_param in self.store.sharded_params
        )
        exact = (
            self.precision.reduce == self.store.dtype
            and wire.grad_dtype is None
            and len(self.memories) == 1
        )
        if wire.ranks == 1 and wire.hook is None and self.memory.aliased and whole and exact:
            return DirectGradBuffer(self.store)
        return ReduceBuffer(
            self.store, self.shard.ranks, self.precision.reduce, self.device, wire.predivisor, wire
        )

    def start_reduction(self) -> None:
        if self._collected is None:  # served for ranks that have gradients
            self._collected = self._make_collected()
            self.filled = self._collected.filled
        if self.reduction is not None:
            self.finish_reduction()
        self.reduction = Reduction(self._collected.reduce(self._wire, self._gradients_text))

    def finish_reduction(self) -> None:
        if self.reduction is not None:
            reduction, self.reduction = self.reduction, None
            self._accept(reduction.finish())

    def _accept(self, grads: Sequence[torch.Tensor | None]) -> None:
        if self._vacant:
            grads = [
                None if position in self._vacant else grad for position, grad in enumerate(grads)
            ]
        if all(map(_requires_grad, self._sharded_params)) and not any(
            map(operator.is_not, map(_grad, self._sharded_params), _NONES)
        ):
            exhaust(map(setattr, self._sharded_params, _GRAD, grads))
            return
        for sharded_param, grad in zip(self._sharded_params, grads, strict=True):
            if not sharded_param.requires_grad:
                continue
            if sharded_param.grad is None or grad is None:
                sharded_param.grad = grad
            else:
                self.home.wait_readers()
                self.replica.wait_readers(
                    f"the gradients of {self.name}"
                )  # of this backward: peers may still read them
                sharded_param.grad.add_(grad)

    def step_in_backward(self) -> None:
        """Let the optimizers that step in backward do it, with gradients that are complete, and
        drop these."""
        for sharded_param in self._sharded_params:
            optimizers = _torch_private.optimizers_in_backward(sharded_param)
            if optimizers and sharded_param.grad is not None:
                if sharded_param.numel():  # a rank without a part of it keeps no state
                    for optimizer in optimizers:
                        optimizer.step()
                sharded_param.grad = None

    def discard(self) -> None:
        """After a backward that raised: wait for what travels, drop partial gradients."""
        if self.reduction is not None:
            reduction, self.reduction = self.reduction, None
            if not self.shard.has_failed and not self.replica.has_failed:
                with contextlib.suppress(StopIteration):  # it has raised, and ended with that
                    reduction.finish()
        if self._collected is not None:
            self._collected.discard()
        for _, unsharded_param in self._unsharded_params:
            unsharded_param.grad = None

    def stray_gradient(self) -> int | None:
        """The index of a leaf with a gradient that came past every hook."""
        return next(
            (index for index, unsharded_param in self._small if unsharded_param.grad is not None),
            None,
        )

    def require_unsharded_params(self) -> None:
        """Raise AssertedStateError, and put it right, if somebody has given a whole parameter other
        memory."""
        for memory in self.memories:
            strayed = memory.strayed()
            if strayed:
                memory.bring_back(self.store, strayed)
                raise AssertedStateError(
                    explain(
                        "A whole parameter was given other memory: its change would be lost with "
                        "the next gather.",
                        expected="changes by `.data =` between steps; inside of forward and until "
                        "backward has ended none",
                        got=f"other memory for parameter {strayed[0]} (shape "
                        f"{tuple(memory.unsharded_params[strayed[0]].shape)})",
                        where=self.name,
                        fix="change it between steps, in place inside of summon_full_params; this "
                        "change was dropped",
                    )
                )

    # -- accumulation without communication

    def note_unreduced(self) -> None:
        """After a backward without communication: leave a gradient (of zeros) where zero_grad will
        find it, and note how it is.

        Also where this rank has no part, until the next reduction: what zero_grad clears is dropped
        on all ranks or on none.
        """
        self._unreduced = []
        for sharded_param, _ in self.store.sharded_params:
            if not sharded_param.requires_grad:
                self._unreduced.append(None)
                continue
            if sharded_param.grad is None:
                sharded_param.grad = torch.zeros_like(sharded_param, dtype=self.grad_dtype)
            grad = sharded_param.grad
            self._unreduced.append(Unreduced(grad, grad._version, grad.any()))

    @property
    def unreduced(self) -> bool:
        return bool(self._unreduced)

    def was_zeroed(self) -> list[Zeroed]:
        """Per target: has zero_grad cleared it since ``note_unreduced``?"""
        found = []
        for (sharded_param, _), note in zip(
            self.store.sharded_params, self._unreduced, strict=True
        ):
            if note is None:
                found.append(Zeroed.NO)
            elif sharded_param.grad is not note.grad:
                found.append(Zeroed.YES)
            elif note.grad._version == note.version or note.grad.any():
                found.append(Zeroed.NO)
            else:
                found.append(Zeroed.YES if note.nonzero else Zeroed.UNCLEAR)
        return found

    def was_written(self) -> bool:
        """True if a noted gradient was written to in place."""
        return any(
            note is not None
            and sharded_param.grad is note.grad
            and note.grad._version != note.version
            for (sharded_param, _), note in zip(
                self.store.sharded_params, self._unreduced, strict=True
            )
        )

    def scaled(self) -> bool:
        """True if a noted gradient was written to, and something that was not zero still is not: a
        change that is no zero_grad."""
        return any(
            note is not None
            and sharded_param.grad is note.grad
            and note.grad._version != note.version
            and bool(note.nonzero)
            and bool(note.grad.any())
            for (sharded_param, _), note in zip(
                self.store.sharded_params, self._unreduced, strict=True
            )
        )

    def drop_unreduced(self, zeroed: Sequence[bool]) -> None:
        """Drop what was collected for the targets that were zeroed, and forget the notes."""
        if self._collected is not None:
            for (_, indices), drop in zip(self.store.sharded_params, zeroed, strict=True):
                if drop:
                    self._collected.drop(indices)
        self._unreduced = []


_grad, _requires_grad, _is_sparse = map(operator.attrgetter, ("grad", "requires_grad", "is_sparse"))


_GRAD, _NONES = itertools.repeat("grad"), itertools.repeat(None)


def _nobody() -> None:
    return None


def _nothing() -> None:
    pass


class _Slot(typing.NamedTuple):
    """One attribute's part in going from one form to the other."""

    module: nn.Module
    parameters: dict[str, nn.Parameter | None]  # of the module
    attribute: str
    new: nn.Parameter | None  # None: the attribute is absent
    old: nn.Parameter | None


class _Swap:
    """Going from one form to the other. What is done in every step is done for all slots by few
    calls of C functions."""

    __slots__ = ("_new", "_old", "_present", "exchange", "slots")

    def __init__(
        self,
        before: Sequence[ModuleSlot],
        after: Sequence[ModuleSlot],
        away: Sequence[DictEntry] = (),
        here: Sequence[DictEntry] = (),
    ) -> None:
        """away, here: placeholders that go and that come with it."""
        self.slots = [
            _Slot(
                new.module,
                _torch_private.parameters_of(new.module),
                new.attribute,
                new.parameter,
                old.parameter,
            )
            for old, new in zip(before, after, strict=True)
        ]
        present = [(slot.parameters, slot.attribute, slot.old) for slot in self.slots]
        gone = [
            entry
            for slot, entry in zip(self.slots, present, strict=True)
            if slot.new is None and slot.old is not None
        ]
        new = [
            (slot.parameters, slot.attribute, slot.new)
            for slot in self.slots
            if slot.new is not None
        ]
        self._present, self._old, self._new = (
            BulkDict(present),
            BulkDict([*gone, *away]),
            BulkDict([*new, *here]),
        )
        # What carries it out, where everything stands that was shown before. What is old is absent
        # then: None would silently drop a bias.
        self.exchange = swap_of(BulkDict([*present, *away]), self._old, self._new)

    def foreign(self) -> _Slot | None:
        """Return a slot where something else stands than what was shown before."""
        if self._present.stand():
            return None
        return next(
            slot for slot in self.slots if slot.parameters.get(slot.attribute) is not slot.old
        )

    def around_others(self) -> _Slot | None:
        """Carry it out where ``exchange`` does not, unless something else stands in a slot; return
        that slot then."""
        foreign = self.foreign()
        if foreign is None:  # somebody has set an attribute where a placeholder was: it stays
            self._old.take_out_own()
            self._new.put_in()
        return foreign


class Uninitialised(typing.NamedTuple):
    """A parameter or buffer of which nobody has said a value yet."""

    name: str  # in the unit's module
    read: Callable[[], torch.Tensor | None]  # what this rank holds of it


class Call:
    """One forward call of a unit, in ticks of the runtime. It lives in the hooks of its outputs.

    The garbage collector does not see what a graph holds. A loss that a module keeps as an
    attribute would keep that module for ever, so a call holds its unit until backward has left it,
    and no longer.
    """

    __slots__ = ("_its_unit", "counted", "enter", "exit", "form", "seen_by", "summoned", "unit")

    def __init__(self, unit: Unit, enter: int) -> None:
        self.unit: Unit | None = unit
        self._its_unit, self.enter, self.summoned = unit.reference, enter, unit.summoned
        self.form = 0 if unit.has_one_form else unit.wanted_form()
        self.counted = False  # among the unit's running calls
        self.exit = -1  # tick; set when the call ends
        self.seen_by = -1  # serial of the backward that has passed it

    def hold_unit(self) -> Unit:
        """Return the unit, for a backward that passes the call again."""
        unit = self.unit = self._its_unit()
        if unit is None:
            raise StateError(
                explain(
                    "A second backward passed a graph whose model is gone, and with it the "
                    "parameters.",
                    expected="a model that lives as long as there are backwards through it",
                    got="a graph that was kept, by retain_graph=True, longer than its model",
                    where="an output of a FullyShardedDataParallel",
                    fix="keep the model until the last backward",
                )
            )
        return unit


class Unit:
    """The parameters that are gathered together, and what its modules show of them.

    What is shown is apart from what is resident: full only inside of forward, and from pre-backward
    until backward leaves the unit. A freed leaf is never within reach, as reading one would read
    freed memory.
    """

    def __init__(
        self,
        module: nn.Module,
        groups: Sequence[Group],
        options: UnitOptions,
        buffers: CastBuffers | None = None,
    ) -> None:
        """module: whose forward calls are the unit's. buffers: what of its buffers is cast, if
        anything."""
        self.module, self.options, self.buffers = module, options, buffers
        self.reference = weakref.ref(self)
        self.owner: Callable[[], nn.Module | None] = _nobody  # weak: the wrapper, if there is one
        self.runtime: Runtime | None = None  # set by the runtime that takes the unit over
        self.label, self.is_root = "a unit", False  # likewise; the label is for errors
        self.running = 0  # forward calls that have entered and not exited
        self.withdrawn = False  # nothing stands where parameters were
        # somebody else shows full parameters (summon_full_params): neither gather nor free
        self.summoned = False
        # the front end takes or loads a state dict: the modules' own methods may see sharded forms
        self.in_state_dict = False
        self.calls: list[Call] = []  # that backward has entered and not left
        self.uninitialised: list[
            Uninitialised
        ] = []  # to be looked at once, before the first forward
        self.residency, self.shown_full = Residency.SHARDED, False  # only this class sets them
        self._attribute_holders = [
            (m.__dict__, _num_internal(m)) for m in module.modules() if _keeps_attributes(m)
        ]
        self.has_one_form = (
            not options.full_precision_in_eval
        )  # the first: that of the dtype computed in
        self.form = 0  # of what is gathered, or was last: 1 for evaluation in full precision
        self._take(groups)

    def _take(self, groups: Sequence[Group]) -> None:
        """Manage ``groups`` from now on, and show them sharded."""
        self.groups = list(groups)
        sharded = [slot for group in self.groups for slot in group.store.shown(None)]
        forms = [self._shown(form) for form in range(1 if self.has_one_form else 2)]
        self._guards = Placeholders(self, forms[0], sharded)
        self._to_full = [_Swap(sharded, shown, away=self._guards.always) for shown in forms]
        self._to_sharded = [_Swap(shown, sharded, here=self._guards.always) for shown in forms]
        self._orders = _orders_to_keep(forms[0])
        self._rnns = list(
            dict.fromkeys(slot.module for slot in forms[0] if isinstance(slot.module, nn.RNNBase))
        )
        self.has_parts, self._has_orders = self._guards.has_parts, bool(self._orders or self._rnns)
        self.show_sharded_again()

    def exchange_groups(self, groups: Sequence[Group]) -> None:
        """Manage ``groups`` in place of those before, whose stores they have. Only while everything
        is sharded."""
        assert self.residency is Residency.SHARDED and not self.shown_full and not self.summoned
        self._guards.retire()
        self._take(groups)

    def _shown(self, form: int) -> list[ModuleSlot]:
        return [
            slot
            for group in self.groups
            for slot in group.store.shown(
                group.memories[min(form, len(group.memories) - 1)].unsharded_params
            )
        ]

    def wanted_form(self) -> int:
        """1 if the unit is to compute in the dtype of its shard now, for evaluation, 0
        otherwise."""
        return 1 if self.options.full_precision_in_eval and not self.module.training else 0

    def _move(self, to: Residency) -> None:
        if to not in _MOVES[self.residency]:
            raise StateError(
                f"internal: {self.label} cannot go from {self.residency.name} to {to.name}"
            )
        self.residency = to

    def attributes(self) -> list[torch.Tensor]:
        """Tensors that forward left on the modules (``self.aux_loss = ...``): a backward from them
        must pass a hook too."""
        return [
            value
            for attributes, start in self._attribute_holders
            if len(attributes) > start
            for value in itertools.islice(attributes.values(), start, None)
            if isinstance(value, torch.Tensor)
        ]

    def holders(self) -> list[nn.Module]:
        """The modules that hold what the unit manages."""
        return list(dict.fromkeys(slot.module for slot in self._to_sharded[0].slots))

    def forget_calls(self) -> None:
        """Backward has left the unit."""
        for call in self.calls:
            call.unit = None
        self.calls.clear()

    @contextlib.contextmanager
    def described(self) -> Iterator[None]:
        """Put parameters without values where attributes are absent, for code that asks for shapes,
        as ``repr`` does."""
        put = []
        if not self.shown_full:
            self._guards.disarm()
        for _, parameters, attribute, unsharded_param, _ in self._to_full[0].slots:
            if unsharded_param is not None and attribute not in parameters:
                parameters[attribute] = nn.Parameter(
                    torch.empty_like(unsharded_param, device="meta"), requires_grad=False
                )
                put.append((parameters, attribute))
        try:
            yield
        finally:
            for parameters, attribute in put:
                del parameters[attribute]
            if not self.shown_full and not self.summoned:
                self._guards.arm()

    def require_state_dict(self, module: nn.Module, method: str) -> None:
        """Raise StateError where a module's own ``state_dict`` or ``load_state_dict`` would meet
        flat or partial parameters."""
        if self.in_state_dict or self.summoned:
            return
        raise StateError(
            explain(
                f"{method}() was called on a module inside of a sharded one, where it meets parts "
                "of parameters only.",
                expected=f"{method}() of the FullyShardedDataParallel around it, or a call inside "
                "of summon_full_params",
                got=f"{method}() that reached a {type(module).__name__} by itself",
                where=self.label,
                fix=f"call {method}() on the wrapper: its names are those of the module before "
                "wrapping",
            )
        )

    def gather(self, form: int = 0) -> None:
        """Collective. Start a gather, unless one is under way or done in this form."""
        if self.form != form and not self.running and not self.summoned:
            self.free()
            self.form = form
            for group in self.groups:
                group.use(form)
        if self.residency is Residency.SHARDED and not self.summoned:
            self._move(Residency.UNSHARDING)
            for group in self.groups:
                group.gather()

    def lacks_no_gradient(self) -> bool:
        """True if the gradients of all trainable leaves have come: nothing in backward reads them
        any more, on any device."""
        return all(group.lacks_no_gradient() for group in self.groups)

    def send_again(self) -> None:
        """Collective. The parameters are here, but other ranks gather them: take part, and receive
        what is there already."""
        for group in self.groups:
            group.gather()
            group.wait()

    def wait(self) -> None:
        """Make the parameters readable."""
        if self.residency is Residency.UNSHARDING:
            for group in self.groups:
                group.wait()
            self._move(Residency.UNSHARDED)

    def free(self) -> None:
        """What a running forward call uses stays: backward may run inside of a forward (forces =
        autograd.grad(energy, x))."""
        if self.running:
            return
        if self.shown_full:
            self.show(False)
        if self.residency is not Residency.SHARDED:
            for group in self.groups:
                group.free()
            self._move(Residency.SHARDED)

    def show(self, full: bool) -> None:
        if self.shown_full is full or self.summoned:
            return
        if full and self.has_parts:
            self._guards.disarm_parts()
        swap = (self._to_full if full else self._to_sharded)[self.form]
        if not swap.exchange():
            foreign = swap.around_others()
            if foreign is not None:
                self._refuse_foreign(foreign)
        self.shown_full = full
        if self._has_orders:
            self.keep_order()
        if self.has_parts and not full:
            self._guards.arm_parts()
            if self.runtime is not None and self.runtime.in_forward:
                self._guards.arm_reads()

    def is_called_itself(self) -> None:
        """The unit's module is not wrapped: its own calls gather."""
        self._guards.leave_forward(self.module)

    def hide_parts(self) -> None:
        """A forward of the model begins: modules that hold parts do not show them."""
        if self._guards.has_parts and not self.shown_full and not self.summoned:
            self._guards.arm_reads()

    def reveal_parts(self) -> None:
        """It has ended."""
        self._guards.disarm_reads()

    def withdraw(self) -> None:
        """Take the sharded form out of the modules, and leave nothing, until
        ``show_sharded_again``."""
        self.withdrawn = True
        self._guards.disarm()
        for _, parameters, attribute, new, _ in self._to_sharded[0].slots:
            if new is not None and parameters.get(attribute) is new:
                parameters[attribute] = None  # in its place among the others

    def begin_summon(self) -> None:
        """Somebody else shows full parameters from now on."""
        self._guards.disarm()
        self.summoned = True

    def end_summon(self) -> None:
        """The opposite of ``lend``."""
        self.show_sharded_again()
        self.summoned = False

    def keep_order(self) -> None:
        """Parameters have been put in or taken out: names come in the order they had, and RNNs see
        them."""
        for module, order in self._orders:
            _reorder(_torch_private.parameters_of(module), order)
        for rnn in self._rnns:
            _torch_private.refresh_rnn_weights(rnn)

    def show_sharded_again(self) -> None:
        """From whatever the modules hold now to the sharded form."""
        self.withdrawn = False
        for _, parameters, attribute, new, _ in self._to_sharded[0].slots:
            if new is None:
                parameters.pop(attribute, None)
            else:
                parameters[attribute] = new
        self.keep_order()
        self._guards.arm()

    def require_own(self) -> None:
        """Raise StateError if somebody has put something else where the sharded form belongs."""
        if not (self.shown_full or self.summoned or self.withdrawn):
            foreign = self._to_full[0].foreign()
            if foreign is not None:
                self._refuse_foreign(foreign)

    def hide_again(self) -> None:
        """Placeholders that somebody has taken out of a module stand there again."""
        if not (self.shown_full or self.summoned):
            self._guards.arm()
            if self.runtime is not None and self.runtime.in_forward:
                self.hide_parts()

    def _refuse_foreign(self, slot: _Slot) -> typing.NoReturn:
        module, parameters, attribute, _, expected = slot
        found = parameters.get(attribute)
        raise StateError(
            explain(
                "A managed parameter was replaced by another object.",
                expected="the parameter that was put there"
                if expected is not None
                else "no such attribute while the unit is sharded",
                got=f"an object of type {type(found).__name__}" if found is not None else "nothing",
                where=f"{self.label}, {type(module).__name__}.{attribute}",
                fix="put back what was there, and change values in place, inside of "
                "summon_full_params or, with "
                "use_orig_params=True, by assigning a Parameter to the attribute between steps; "
                "deleting parameters, "
                "parametrizations made after wrapping and torch.func.functional_call cannot "
                "replace sharded parameters",
            )
        )


_INTERNAL = frozenset((*nn.Module().__dict__, *MARKS))


def _num_internal(module: nn.Module) -> int:
    """How many of a module's first attributes are nn.Module's own, or marks."""
    return next(
        (n for n, name in enumerate(module.__dict__) if name not in _INTERNAL), len(module.__dict__)
    )


def _keeps_attributes(module: nn.Module) -> bool:
    """Torch's own layers, and wrappers, leave no tensors on themselves in forward; looking through
    all of them would cost more than the swap."""
    return type(module).__module__.partition(".")[0] not in ("torch", __name__.partition(".")[0])


def _orders_to_keep(shown: Sequence[ModuleSlot]) -> list[tuple[nn.Module, list[str]]]:
    """Modules that hold, beside what a unit manages, parameters of others: swapping would change
    the order of their names."""
    managed: dict[nn.Module, list[str]] = {}
    for module, attribute, parameter in shown:
        if parameter is not None:  # a FlatParameter is absent while the leaves are shown
            managed.setdefault(module, []).append(attribute)
    kept = []
    for module, names in managed.items():
        order = [
            name
            for name, parameter in _torch_private.parameters_of(module).items()
            if parameter is not None or name in names
        ]
        if order != names:
            kept.append((module, order))
    return kept


def _reorder(parameters: dict[str, nn.Parameter | None], order: Sequence[str]) -> None:
    items = {
        name: parameters[name] for name in itertools.chain(order, parameters) if name in parameters
    }
    if list(items) != list(parameters):
        parameters.clear()
        parameters.update(items)
