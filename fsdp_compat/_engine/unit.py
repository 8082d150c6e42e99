"""Units: groups that are gathered, shown, reduced and freed together, and what memory each of them holds now."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import itertools
import typing
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from ..errors import StateError, explain
from . import torch_private
from .collectives import Communicator, Pending, communicator
from .dtypes import Precision
from .mesh import Mesh
from .reduce import Collected, HandedGradients, ReduceBuffer, Reduction, Wire
from .storage import GroupMemory
from .store import ParamStore, Shown

if typing.TYPE_CHECKING:
    from .runtime import Runtime

__all__ = ["LARGE", "Call", "Group", "Residency", "Unit", "UnitOptions"]

LARGE = 65536  # elements; gradients below are moved together when the unit is left, without a hook each


class Residency(enum.Enum):
    """What memory the groups of a unit hold."""

    SHARDED = enum.auto()  # holds: own shard
    GATHERING = enum.auto()  # holds: own shard + full buffer, not readable yet
    FULL = enum.auto()  # holds: own shard + full form, readable


_MOVES = frozenset(
    {
        (Residency.SHARDED, Residency.GATHERING),
        (Residency.GATHERING, Residency.FULL),
        (Residency.GATHERING, Residency.SHARDED),  # gathered on a wrong guess, or an exception came
        (Residency.FULL, Residency.SHARDED),
    }
)


@dataclasses.dataclass(frozen=True)
class UnitOptions:
    """What one unit was asked to do, resolved."""

    reshard_after_forward: bool
    cast_inputs: bool  # floating-point inputs of forward are cast to `compute_dtype`
    cast_root_inputs: bool  # the same, for the unit that a forward begins with
    compute_dtype: torch.dtype
    device: torch.device


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
    """The engine's half of one store: which of its memory is there, what travels, which gradients have come. It knows no layout."""

    def __init__(self, store: ParamStore, mesh: Mesh, precision: Precision, device: torch.device) -> None:
        """Collective over the mesh, once per process group (see ``communicator``)."""
        self.name = ""  # of its unit, for errors; the runtime sets it
        self.store, self.precision, self.device = store, precision, device
        self.shard: Communicator = communicator(mesh.shard, device)
        self.replica: Communicator = communicator(mesh.replica, device)
        self.floating = store.dtype.is_floating_point
        self.memory = GroupMemory(store, mesh.shard.ranks, precision.gather, device)
        self.leaves = self.memory.leaves
        self._small = [index for index, leaf in enumerate(self.leaves) if leaf.numel() < LARGE]
        self._tag = self.shard.new_tag()
        self._wire = Wire(self.shard, self.replica, self._tag, self.replica.new_tag())
        self._hooked: set[int] = set()
        self._gathering: Pending | None = None
        self._collected: Collected | None = None  # made when the first gradient comes: frozen groups never have one
        self._unreduced: list[Unreduced | None] = []
        self.reduction: Reduction | None = None

    # -- parameters

    def gather(self) -> None:
        memory = self.memory
        if memory.aliased:
            return
        memory.allocate()
        own = self.store.outgoing(self.precision.gather)
        self._gathering = self.shard.begin_gather(own, memory.full, memory.segments, self._tag)

    def wait(self) -> None:
        """Make the leaves readable."""
        self._arrive()
        self.memory.fill_leaves()

    def free(self) -> None:
        self._arrive()  # memory that is being received into cannot be freed
        self.memory.free()

    def gather_full(self, own: torch.Tensor | None = None) -> torch.Tensor:
        """Return [ranks * S] from every rank's ``own`` [S], by default the shard: memory of its own, unless there is one rank.

        Collective. It does not touch what the group holds for forward and backward.
        """
        return self.shard.gather_now(self.store.outgoing(self.store.dtype) if own is None else own)

    def _arrive(self) -> None:
        if self._gathering is not None:
            pending, self._gathering = self._gathering, None
            self.shard.end_gather(pending, f"the parameters of {self.name}")

    def follow_requires_grad(self, make_hook: Callable[[Group, int], None]) -> None:
        """Honour toggles on what the optimizer sees. ``make_hook(group, index)`` hooks a large leaf when it is first trainable."""
        for target, indices in self.store.targets:
            wanted = target.requires_grad
            for index in indices:
                leaf = self.leaves[index]
                if leaf.requires_grad is not wanted:
                    leaf.requires_grad_(wanted)
                if wanted and leaf.numel() >= LARGE and index not in self._hooked:
                    self._hooked.add(index)
                    make_hook(self, index)

    # -- gradients

    @property
    def has_gradients(self) -> bool:
        return bool(self._collected)

    @property
    def resident_nbytes(self) -> int:
        """Bytes beyond shard, gradients and optimizer state that are held now."""
        return self.memory.resident_nbytes + (self._collected.resident_nbytes if self._collected is not None else 0)

    def take(self, index: int) -> None:
        """Move one large leaf's gradient to where they collect."""
        leaf = self.leaves[index]
        grad, leaf.grad = leaf.grad, None
        if grad is not None:  # a hook may fire without a gradient
            self._put([(index, grad)])

    def collect(self) -> None:
        """Move the gradients of the small leaves, which autograd has left in ``.grad``."""
        leaves, found = self.leaves, []
        for index in self._small:
            leaf = leaves[index]
            grad = leaf.grad
            if grad is not None:
                leaf.grad = None
                found.append((index, grad))
        if found:
            self._put(found)

    def _put(self, found: list[tuple[int, torch.Tensor]]) -> None:
        self.finish_reduction()  # the buffer may still be travelling
        if self._collected is None:
            self._collected = self._make_collected()
        for position, (index, grad) in enumerate(found):
            if grad.is_sparse:
                found[position] = index, grad.to_dense()
            elif grad.requires_grad:  # create_graph
                found[position] = index, grad.detach()
        self._collected.put(found)

    def _make_collected(self) -> Collected:
        whole = all(
            len(target.leaves) == 1 and target.parameter.shape == self.leaves[target.leaves[0]].shape
            for target in self.store.targets
        )
        if self._wire.ranks == 1 and self.memory.aliased and whole and self.precision.reduce == self.store.dtype:
            return HandedGradients(self.store)
        return ReduceBuffer(self.store, self.shard.ranks, self.precision.reduce, self.device)

    def start_reduction(self) -> None:
        if self._collected is None:  # served for ranks that have gradients
            self._collected = self._make_collected()
        self.finish_reduction()
        self.reduction = Reduction(self._collected.reduce(self._wire, f"the gradients of {self.name}"))

    def finish_reduction(self) -> None:
        if self.reduction is not None:
            reduction, self.reduction = self.reduction, None
            self._accept(reduction.finish())

    def _accept(self, grads: Sequence[torch.Tensor]) -> None:
        for (target, _), grad in zip(self.store.targets, grads, strict=True):
            if not target.requires_grad:
                continue
            if target.grad is None:
                target.grad = grad
            else:
                target.grad.add_(grad)

    def discard(self) -> None:
        """After a backward that raised: wait for what travels, drop partial gradients."""
        if self.reduction is not None:
            reduction, self.reduction = self.reduction, None
            reduction.finish()
        if self._collected is not None:
            self._collected.discard()
        for index in self._small:
            self.leaves[index].grad = None

    def stray_gradient(self) -> int | None:
        """The index of a leaf with a gradient that came past every hook."""
        leaves = self.leaves
        return next((index for index in self._small if leaves[index].grad is not None), None)

    # -- accumulation without communication

    def note_unreduced(self) -> None:
        """After a backward without communication: leave a gradient (of zeros) where zero_grad will find it, and note how it is."""
        self._unreduced = []
        for target, _ in self.store.targets:
            if not target.requires_grad:
                self._unreduced.append(None)
                continue
            if target.grad is None:
                target.grad = torch.zeros_like(target)
            grad = target.grad
            self._unreduced.append(Unreduced(grad, grad._version, grad.any()))

    @property
    def unreduced(self) -> bool:
        return bool(self._unreduced)

    def was_zeroed(self) -> list[Zeroed]:
        """Per target: has zero_grad cleared it since ``note_unreduced``?"""
        found = []
        for (target, _), note in zip(self.store.targets, self._unreduced, strict=True):
            if note is None:
                found.append(Zeroed.NO)
            elif target.grad is not note.grad:
                found.append(Zeroed.YES)
            elif note.grad._version == note.version or note.grad.any():
                found.append(Zeroed.NO)
            else:
                found.append(Zeroed.YES if note.nonzero else Zeroed.UNCLEAR)
        return found

    def was_written(self) -> bool:
        """True if a noted gradient was written to in place."""
        return any(
            note is not None and target.grad is note.grad and note.grad._version != note.version
            for (target, _), note in zip(self.store.targets, self._unreduced, strict=True)
        )

    def scaled(self) -> bool:
        """True if a noted gradient was written to, and something that was not zero still is not: a change that is no zero_grad."""
        return any(
            note is not None
            and target.grad is note.grad
            and note.grad._version != note.version
            and bool(note.nonzero)
            and bool(note.grad.any())
            for (target, _), note in zip(self.store.targets, self._unreduced, strict=True)
        )

    def drop_unreduced(self, zeroed: Sequence[bool]) -> None:
        """Drop what was collected for the targets that were zeroed, and forget the notes."""
        if self._collected is not None:
            for (_, indices), drop in zip(self.store.targets, zeroed, strict=True):
                if drop:
                    self._collected.drop(indices)
        self._unreduced = []


class _Swap(typing.NamedTuple):
    """One attribute's part in going from one form to the other."""

    module: nn.Module
    parameters: dict[str, nn.Parameter | None]  # of the module
    attribute: str
    new: nn.Parameter | None  # None: the attribute is absent
    old: nn.Parameter | None


class Call:
    """One forward call of a unit, in ticks of the runtime. It lives in the hooks of its outputs."""

    __slots__ = ("enter", "exit", "lent", "seen_by", "unit")

    def __init__(self, unit: Unit, enter: int) -> None:
        self.unit, self.enter, self.lent = unit, enter, unit.lent
        self.exit = -1  # tick; set when the call ends
        self.seen_by = -1  # serial of the backward that has passed it


class Unit:
    """The parameters that are gathered together, and what its modules show of them.

    What is shown is apart from what is resident: full only inside of forward, and from pre-backward until backward leaves the unit.
    A freed leaf is never within reach, as reading one would read freed memory.
    """

    def __init__(self, module: nn.Module, groups: Sequence[Group], options: UnitOptions) -> None:
        """module: whose forward calls the hooks bracket."""
        self.module, self.groups, self.options = module, list(groups), options
        self.runtime: Runtime | None = None  # set by the runtime that takes the unit over
        self.label, self.is_root = "a unit", False  # likewise; the label is for errors
        self.running = 0  # forward calls that have entered and not exited
        self.lent = False  # somebody else shows full parameters (summon_full_params): neither gather nor free
        self.in_state_dict = False  # the front end takes or loads a state dict: the modules' own methods may see sharded forms
        self.calls: list[Call] = []  # that backward has entered and not left
        self._residency, self._shown_full = Residency.SHARDED, False
        self._attribute_holders = [(m.__dict__, _num_internal(m)) for m in module.modules() if _keeps_attributes(m)]
        shown = {full: [slot for group in self.groups for slot in group.store.shown(full)] for full in (True, False)}
        self._swaps = {
            full: [
                _Swap(slot.module, torch_private.parameters_of(slot.module), slot.attribute, slot.parameter, before.parameter)
                for slot, before in zip(shown[full], shown[not full], strict=True)
            ]
            for full in (True, False)
        }
        self._orders = _orders_to_keep(shown[True])
        self._rnns = list(dict.fromkeys(slot.module for slot in shown[True] if isinstance(slot.module, nn.RNNBase)))
        self.show_sharded_again()

    @property
    def residency(self) -> Residency:
        return self._residency

    @property
    def shown_full(self) -> bool:
        return self._shown_full

    def _move(self, to: Residency) -> None:
        if (self._residency, to) not in _MOVES:
            raise StateError(f"internal: {self.label} cannot go from {self._residency.name} to {to.name}")
        self._residency = to

    def attributes(self) -> list[torch.Tensor]:
        """Tensors that forward left on the modules (``self.aux_loss = ...``): a backward from them must pass a hook too."""
        return [
            value
            for attributes, start in self._attribute_holders
            for value in itertools.islice(attributes.values(), start, None)
            if isinstance(value, torch.Tensor)
        ]

    def holders(self) -> list[nn.Module]:
        """The modules that hold what the unit manages."""
        return list(dict.fromkeys(swap.module for swap in self._swaps[False]))

    @contextlib.contextmanager
    def described(self) -> Iterator[None]:
        """Put parameters without values where attributes are absent, for code that asks for shapes, as ``repr`` does."""
        put = []
        for _, parameters, attribute, leaf, _ in self._swaps[True]:
            if leaf is not None and attribute not in parameters:
                parameters[attribute] = nn.Parameter(torch.empty_like(leaf, device="meta"), requires_grad=False)
                put.append((parameters, attribute))
        try:
            yield
        finally:
            for parameters, attribute in put:
                del parameters[attribute]

    def require_state_dict(self, module: nn.Module, method: str) -> None:
        """Raise StateError where a module's own ``state_dict`` or ``load_state_dict`` would meet flat or partial parameters."""
        if self.in_state_dict or self.lent:
            return
        raise StateError(
            explain(
                f"{method}() was called on a module inside of a sharded one, where it meets parts of parameters only.",
                expected=f"{method}() of the FullyShardedDataParallel around it, or a call inside of summon_full_params",
                got=f"{method}() that reached a {type(module).__name__} by itself",
                where=self.label,
                fix=f"call {method}() on the wrapper: its names are those of the module before wrapping",
            )
        )

    def gather(self) -> None:
        """Collective. Start a gather, unless one is under way or done."""
        if self._residency is Residency.SHARDED and not self.lent:
            self._move(Residency.GATHERING)
            for group in self.groups:
                group.gather()

    def wait(self) -> None:
        """Make the parameters readable."""
        if self._residency is Residency.GATHERING:
            for group in self.groups:
                group.wait()
            self._move(Residency.FULL)

    def free(self) -> None:
        """What a running forward call uses stays: backward may run inside of a forward (forces = autograd.grad(energy, x))."""
        if self.running:
            return
        self.show(False)
        if self._residency is not Residency.SHARDED:
            for group in self.groups:
                group.free()
            self._move(Residency.SHARDED)

    def show(self, full: bool) -> None:
        if self._shown_full is full or self.lent:
            return
        for swap in self._swaps[full]:
            _, parameters, attribute, new, old = swap
            if parameters.get(attribute) is not old:
                self._refuse_foreign(swap)
            if new is None:
                parameters.pop(attribute, None)  # absent raises on use; None would silently drop a bias
            else:
                parameters[attribute] = new
        self._shown_full = full
        self.keep_order()

    def keep_order(self) -> None:
        """Parameters have been put in or taken out: names come in the order they had, and RNNs see them."""
        for module, order in self._orders:
            _reorder(torch_private.parameters_of(module), order)
        for rnn in self._rnns:
            torch_private.refresh_rnn_weights(rnn)

    def show_sharded_again(self) -> None:
        """From whatever the modules hold now to the sharded form."""
        swaps = self._swaps[False]
        for _, parameters, attribute, _, _ in swaps:
            parameters.pop(attribute, None)
        for _, parameters, attribute, new, _ in swaps:
            if new is not None:
                parameters[attribute] = new
        self.keep_order()

    def _refuse_foreign(self, swap: _Swap) -> typing.NoReturn:
        module, parameters, attribute, _, expected = swap
        found = parameters.get(attribute)
        raise StateError(
            explain(
                "A managed parameter was replaced by another object.",
                expected="the parameter that was put there"
                if expected is not None
                else "no such attribute while the unit is sharded",
                got=f"an object of type {type(found).__name__}" if found is not None else "nothing",
                where=f"{self.label}, {type(module).__name__}.{attribute}",
                fix="change values in place, or inside of summon_full_params; torch.func.functional_call and "
                "load_state_dict(assign=True) cannot replace sharded parameters",
            )
        )


_INTERNAL = frozenset(nn.Module().__dict__)


def _num_internal(module: nn.Module) -> int:
    """How many of a module's first attributes are nn.Module's own."""
    return next((n for n, name in enumerate(module.__dict__) if name not in _INTERNAL), len(module.__dict__))


def _keeps_attributes(module: nn.Module) -> bool:
    """Torch's own layers leave no tensors on themselves in forward; looking through all of them would cost more than the swap."""
    return not type(module).__module__.startswith("torch.")


def _orders_to_keep(shown: Sequence[Shown]) -> list[tuple[nn.Module, list[str]]]:
    """Modules that hold, beside what a unit manages, parameters of others: swapping would change the order of their names."""
    managed: dict[nn.Module, list[str]] = {}
    for module, attribute, parameter in shown:
        if parameter is not None:  # a FlatParameter is absent while the leaves are shown
            managed.setdefault(module, []).append(attribute)
    kept = []
    for module, names in managed.items():
        order = [name for name, parameter in torch_private.parameters_of(module).items() if parameter is not None]
        if order != names:
            kept.append((module, order))
    return kept


def _reorder(parameters: dict[str, nn.Parameter | None], order: Sequence[str]) -> None:
    items = {name: parameters[name] for name in itertools.chain(order, parameters) if name in parameters}
    if list(items) != list(parameters):
        parameters.clear()
        parameters.update(items)
