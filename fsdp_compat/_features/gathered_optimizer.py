"""An optimizer of whole parameters: each is stepped on one rank, its owner.

In a step two exchanges bring values and gradients to the owners, and a third one brings the new
values back to the shards."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .._comm.agreement import agreeing
from .._comm.transport import are_alike
from .._engine import rendezvous
from .._engine.group import Group
from .._engine.state_store import store_of
from .._state.dry_run import states_to_be
from .._state.elementwise import depends_on_others, small_shape
from .._state.optim_agreement import gathered_along
from .._state.optim_contents import (
    CompositeOptimizer,
    NumberedState,
    StateView,
    begin,
    contents_of,
    numbered_state_dict,
    of_tensors,
    ownership_of,
    register_whole,
)
from .._state.optim_export import ExportForm, Values, export_optim_state
from .._state.optim_import import import_optim_state
from .._state.units import NamedUnit, model_units_in, names_before, names_of, runtimes_of, units_of
from ..errors import RuntimeUsageError, UsageError, require_module, takes, unusable, wrong_type
from .grad_norms import require_reduced
from .whole_exchange import Exchange, InPlace, Place, owners_of

_WHAT = "GatheredOptimizer"
Make = Callable[[list[nn.Parameter]], Optimizer]
Select = Callable[[str, tuple[int, ...]], bool]


class GatheredOptimizer(CompositeOptimizer):
    """Step whole parameters with any optimizer that updates each of them on its own.

    Such as Muon, Shampoo, SOAP, Adafactor and LAMB. On shards they are silently wrong, or raise.

        optimizer = GatheredOptimizer(
            model,
            lambda params: torch.optim.Muon(params, lr=0.02),
            select=lambda name, shape: len(shape) == 2 and "embed" not in name,
            others=lambda params: torch.optim.AdamW(params, lr=3e-4),
        )

    Each selected parameter is stepped on one of the ranks that have a part of it, its owner, and
    the result is that of one process. Schedulers, closures, accumulation with ``no_sync``,
    ``model.clip_grad_norm_`` and ShardedGradScaler work as with any optimizer. Replicas of
    HYBRID_SHARD compute the same update each, so an optimizer that draws random numbers must draw
    the same on all of them. Optimizers that show other weights for evaluation, such as
    schedule-free ones, do not work.

    A step sends the values and the gradients of about one shard to owners, and new values back; not
    those of parameters that lie whole on one rank, as ``shard_blocks`` can make them.
    Between steps only the owners' state takes memory, about as much on each rank.

    ``state_dict()``, ``FSDP.optim_state_dict`` and ``fsdp_compat.checkpoint`` keep the state by the
    names of the parameters, whole: any number of ranks can load it, with other owners, also
    factored and 8-bit states.

    Collective: all ranks of the model: values are brought to their owners.

    Args:
        model: sharded, of either front end, with values.
        make: returns an optimizer of the whole parameters that this rank owns; without any, of one
            that is never stepped. It is also tried on small parameters.
        select: chooses trainable parameters by name before wrapping and whole shape; None: all.
        others: returns an optimizer of the rest, on the shards, which must be elementwise, as AdamW
            is; None: ``unselected`` has the rest, for an optimizer of your own.

    Raises:
        UsageError: on all ranks: an optimizer in which parameters depend on each other, as by
            Prodigy's step size or by clipping of its own; selected parameters that tensor
            parallelism cuts."""

    def __init__(
        self, model: nn.Module, make: Make, select: Select | None = None, others: Make | None = None
    ) -> None:
        require_module(model, _WHAT)
        for name, given, num_arguments in (
            ("make", make, 1),
            ("select", select, 2),
            ("others", others, 1),
        ):
            is_left_out = given is None and name != "make"
            if not (is_left_out or (callable(given) and takes(given, num_arguments))):
                expected = f"a function of {num_arguments} argument(s)"
                raise wrong_type(name, expected + ", or None" * (name != "make"), given, _WHAT)
        units, self._groups = begin(model, _WHAT, f"{_WHAT}(...)")
        axes = dict.fromkeys(axis for each in self._groups for axis in (each.shard, each.replica))
        self._model, self._axes = model, [axis for axis in axes if axis.ranks > 1]
        select = select or (lambda name, shape: True)
        choice = self._agreed_choice(units, select, others is not None)
        self.unselected = choice.rest if others is None else []
        by_kind: dict[object, list[Place]] = {}
        for place in choice.places:
            kind = place.group.shard, place.store.dtype, place.store.shard.device, place.lies_whole
            by_kind.setdefault(kind, []).append(place)
        self._exchanges = [
            (InPlace if places[0].lies_whole else Exchange)(places, owners_of(places))
            for places in by_kind.values()
        ]
        exchange = functools.partial(gathered_along, self._axes)
        with agreeing(exchange, f"{_WHAT} could not be made on all ranks") as agreement:
            self._make(choice, make, others)
            own = ownership_of(self.param_groups, _WHAT, units, model)
            agreement.own = own.names_by_group
        sizes = [len(names) for names in agreement.by_rank]
        if len({*sizes}) > 1:
            raise _unmade(f"optimizers of {sizes} parameter groups, by rank")
        order = {name: number for number, name in enumerate(names_before(model))}
        self.group_names = [
            sorted({*itertools.chain(*names)}, key=lambda name: order.get(name, len(order)))
            for names in zip(*agreement.by_rank, strict=True)
        ]
        sharded = dict.fromkeys(place.param for place in choice.places)
        self.trained = [*sharded, *choice.unsharded, *(choice.rest if others is not None else ())]
        stores = map(store_of, self._groups)
        sharded_params = (param for store in stores for param, _ in store.sharded_params)
        self._frozen = [param for param in sharded_params if not param.requires_grad]
        for each in self._exchanges:
            each.release()

    def _agreed_choice(
        self, units: Sequence[NamedUnit], select: Select, has_others: bool
    ) -> _Choice:
        """Collective: a choice that is the same on all ranks, or an error on all of them."""
        found: _Choice | Exception
        try:
            found = _Choice(units, self._model, select, has_others)
            text = repr([(place.name, place.is_selected) for place in found.places])
        except Exception as error:  # raised after the other ranks have been told
            found, text = error, str(error)
        is_same = are_alike(text, self._axes, "the choice of parameters")
        if isinstance(found, Exception):
            raise found
        if not is_same:
            raise RuntimeUsageError.of(
                "The ranks select different parameters.",
                expected="a function select that returns the same on every rank",
                got="another choice, or an error, on another rank",
                where=f"{_WHAT}(select=)",
                fix="decide by name and shape alone; see the error on that rank, if there is one",
            )
        return found

    def _make(self, choice: _Choice, make: Make, others: Make | None) -> None:
        """Make the inner optimizers, and take over their groups and states."""
        wholes: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for each in self._exchanges:
            for place, whole in zip(each.owned, each.wholes, strict=True):
                register_whole(whole, place.group, place.index)
                wholes[place.is_selected].append(whole)
        example = choice.example
        _require_independent(make, example)
        optimizers = [_made("make", make, choice.unsharded + wholes[True], example)]
        if others is not None and choice.has_rest:
            optimizers.append(_made("others", others, choice.rest + wholes[False], example))
        super().__init__([p for each in optimizers for p in _params_of(each)], {})
        self.optimizers, self.defaults = optimizers, dict(optimizers[0].defaults)
        self._step_supports_amp_scaling = True  # torch's GradScaler then says that it is there
        self.state = StateView(optimizers)  # type: ignore[assignment]
        self.param_groups = [group for each in optimizers for group in each.param_groups]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter on its owner.

        Collective: all ranks of the model: three exchanges per shard axis and dtype.

        Args:
            closure: computes the loss; it is called once.

        Returns:
            What ``closure`` returns.

        Raises:
            StateError: inside forward or backward, and for gradients that are not reduced."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._require_steppable()
        try:
            for each in self._exchanges:
                each.fetch()
            for optimizer in self.optimizers:
                optimizer.step()
            for each in self._exchanges:
                each.put_back()
        finally:
            for each in self._exchanges:
                each.release()
        return loss

    def _require_steppable(self) -> None:
        what = f"{_WHAT}.step"
        units = model_units_in(self._model)
        for runtime in runtimes_of(units):
            runtime.require_idle(what)
            runtime.require_parts(what)
        groups = [group for own in units for group in own.unit.groups]
        if groups != self._groups or any(p.requires_grad for p in self._frozen):
            raise UsageError.of(
                "The model's units, or the parameters that are trained, have changed.",
                expected=f"those that the model had when {_WHAT} was made",
                got="units that were made later, or a parameter that was frozen then",
                where=f"{what}()",
                fix="make it after the last change of wrapping, and after unfreezing parameters",
            )
        if vars(self).pop("found_inf", None) is not None:  # torch's GradScaler has set it
            raise UsageError.of(
                f"torch.amp.GradScaler does not see the gradients that {_WHAT} uses.",
                expected="ShardedGradScaler",
                got="a GradScaler",
                where=f"{what}()",
                fix="use fsdp_compat.sharded_grad_scaler.ShardedGradScaler",
            )
        require_reduced(groups)
        rendezvous.require_all_ranks_once(what, groups)
        for runtime in runtimes_of(units):
            runtime.reshard_all()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all parameters that are stepped; ``set_to_none`` frees them."""
        for parameter in self.trained:
            if set_to_none or parameter.grad is None:
                parameter.grad = None
            else:
                parameter.grad.requires_grad_(False).zero_()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Not possible: any ``param_group`` is a UsageError."""
        if self.optimizers:
            raise UsageError.of(
                f"{_WHAT} takes no further parameters.",
                expected="all parameters when it is made",
                got="a call of add_param_group",
                where=_WHAT,
                fix="make another one; its own state_dict() loads into it",
            )
        super().add_param_group(param_group)

    # -- its state

    def state_dict(self) -> dict[str, Any]:
        """Return {"state": ..., "param_groups": ...} by the names of the parameters.

        It has whole states of those that this rank owns, and its shards of others. For
        torch.distributed.checkpoint, and for ``load_state_dict`` on as many ranks.

        Collective: all ranks of the model: small exchanges."""
        form = ExportForm(Values.BOXES, to_cpu=False, first_step=True)
        where = f"{_WHAT}.state_dict()"
        return export_optim_state(self._model, self, self.param_groups, None, form, where)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a ``state_dict`` of this class, or one that torch.distributed.checkpoint has filled.

        Also what ``FSDP.optim_state_dict`` or ``FSDP.optim_state_dict_to_load`` returned.

        Collective: all ranks of the model, unless it comes from optim_state_dict_to_load."""
        if not isinstance(state_dict, NumberedState):
            where = f"{_WHAT}.load_state_dict()"
            state_dict = import_optim_state(self._model, self.param_groups, state_dict, where, self)
        states, start = self._put_together(state_dict["state"]), 0
        groups = list(state_dict.get("param_groups") or numbered_state_dict(self)["param_groups"])
        users = {key: state for key, state in states.items() if not isinstance(key, int)}
        for each in self.optimizers:
            its_groups = [groups.pop(0) for _ in each.param_groups]
            numbers = range(start, start + len(_params_of(each)))
            each.load_state_dict(
                {
                    "state": users | {n - start: states[n] for n in numbers if n in states},
                    "param_groups": [
                        {**group, "params": [n - start for n in group["params"]]}
                        for group in its_groups
                    ],
                }
            )
            start, users = numbers.stop, {}
        self.param_groups = [group for each in self.optimizers for group in each.param_groups]

    def __getstate__(self) -> dict[str, Any]:
        raise UsageError.of(
            f"{_WHAT} cannot be copied or pickled.",
            expected="state_dict(), or FSDP.optim_state_dict(model, optimizer)",
            got="a copy of the optimizer itself",
            where=_WHAT,
            fix="make another one for the other model, and load the state into it",
        )

    def _put_together(self, states: Mapping[Any, Any]) -> Mapping[Any, Any]:
        """Return states with the tensors that wrap others, as a first step makes them."""
        owned = {key: state for key, state in states.items() if isinstance(key, int)}
        if not any(isinstance(v, Mapping) for state in owned.values() for v in state.values()):
            return states
        units = units_of(self._model)
        like = states_to_be(ownership_of(self.param_groups, _WHAT, units, self._model), self)
        params = _params_of(self)
        found = {key: of_tensors(each, like.get(params[key], {})) for key, each in owned.items()}
        return {**states, **found}


def _unmade(got: str) -> RuntimeUsageError:
    return RuntimeUsageError.of(
        f"{_WHAT} could not be made on all ranks.",
        expected="functions make and others that return optimizers of the given parameters, with "
        "as many groups on every rank",
        got=got,
        where=f"{_WHAT}(...)",
        fix="see the error on the rank that raised it; a group may be empty on some ranks",
    )


class _Choice:
    """What is stepped whole, and what is not."""

    def __init__(
        self, units: Sequence[NamedUnit], model: nn.Module, select: Select, has_others: bool
    ) -> None:
        """Raises UsageError for parameters that cannot be stepped whole."""
        self.places: list[Place] = []
        self.unsharded: list[nn.Parameter] = []  # selected
        self.rest: list[nn.Parameter] = []  # sharded or not
        for named in units:
            for group in named.unit.groups:
                self._add(group, named.prefix, select, has_others)
        for parameter, contents in contents_of(units, model).items():
            if contents.group is None and parameter.requires_grad:
                is_selected = select(contents.names[0][1], tuple(parameter.shape))
                (self.unsharded if is_selected else self.rest).append(parameter)
        if not self.unsharded and not any(place.is_selected for place in self.places):
            raise UsageError.of(
                "No parameter is selected.",
                expected="a trainable parameter that is stepped whole",
                got="none",
                where=f"{_WHAT}(select=)",
                fix="select by the name before wrapping, and by the shape of the whole parameter",
            )

    def _add(self, group: Group, prefix: str, select: Select, has_others: bool) -> None:
        store = store_of(group)
        for param, indices in store.sharded_params:
            if not param.requires_grad:
                continue
            names = [names_of(store.orig_params[index], prefix)[0] for index in indices]
            places = [
                Place(name, group, index, param, bool(select(name, tuple(store.shape(index)))))
                for name, index in zip(names, indices, strict=True)
            ]
            chosen = [place.is_selected for place in places]
            if not any(chosen):
                self.rest.append(param)
                continue
            if not (all(chosen) or has_others):
                raise _refused(
                    "A FlatParameter holds parameters that are selected, and others that are not.",
                    "others=, a function that makes an optimizer of the others",
                    f"{names[chosen.index(False)]!r} beside {names[chosen.index(True)]!r}",
                    group,
                    "pass others=, or wrap with use_orig_params=True",
                )
            for place in places:
                _require_whole(place)
            self.places += places

    @property
    def example(self) -> torch.Tensor:
        """A small tensor with as many dims as the selected parameters, at most."""
        shapes = [tuple(parameter.shape) for parameter in self.unsharded]
        shapes += [place.shape for place in self.places if place.is_selected]
        like = [*self.unsharded, *(each.value() for each in self.places[:1])][0]
        shape = small_shape(max(shapes, key=len))
        return torch.zeros(shape, dtype=like.dtype, device=like.device)

    @property
    def has_rest(self) -> bool:
        """True if there is something for ``others``, here or on another rank."""
        return bool(self.rest) or not all(place.is_selected for place in self.places)


def _require_whole(place: Place) -> None:
    """Raise UsageError for a parameter that cannot be stepped whole."""
    store, parallel = place.store, place.store.parallel[place.index]
    if parallel is not None and store.local_shape(place.index) != place.shape:
        raise _refused(
            "Tensor parallelism cuts a selected parameter.",
            "parameters that are sharded by FSDP alone",
            f"{place.name!r} of shape {place.shape}, of which this process has "
            f"{store.local_shape(place.index)}",
            place.group,
            "leave it out with select=, and step it with an elementwise optimizer",
        )
    if store.shard.is_meta:
        raise _refused(
            "A selected parameter has no values yet.",
            "parameters with values",
            f"{place.name!r} on the meta device",
            place.group,
            "make the optimizer after the parameters have got their values",
        )


def _refused(what: str, expected: str, got: str, group: Group, fix: str) -> UsageError:
    where = f"{_WHAT}(select=), {group.name}"
    return UsageError.of(what, expected=expected, got=got, where=where, fix=fix)


def _params_of(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _made(name: str, make: Make, given: list[nn.Parameter], example: torch.Tensor) -> Optimizer:
    """Return what a user's function makes. Raises UsageError unless it holds what it was given."""
    if not given:
        given = [nn.Parameter(torch.zeros_like(example))]
        register_whole(given[0])
    optimizer: Any = make(given)
    if not isinstance(optimizer, Optimizer):
        raise unusable(f"The result of {name}", "a torch.optim.Optimizer", optimizer, _WHAT)
    missing = {*given} - {*_params_of(optimizer)}
    if missing:
        raise UsageError.of(
            f"The optimizer that {name} made lacks parameters that it was given.",
            expected=f"all {len(given)} in its groups",
            got=f"{len(given) - len(missing)}",
            where=f"{_WHAT}({name}=), {type(optimizer).__name__}",
            fix="leave parameters out with select=, not in the function",
        )
    return optimizer


def _require_independent(make: Make, example: torch.Tensor) -> None:
    """Raise UsageError for an optimizer in which parameters depend on each other."""
    if depends_on_others(make, tuple(example.shape), example.device):
        name = type(make([nn.Parameter(torch.zeros_like(example))])).__name__
        raise UsageError.of(
            f"The updates of {name} depend on all parameters together.",
            expected="an optimizer that updates each parameter by itself",
            got="another update of a parameter if the optimizer has a second one",
            where=f"{_WHAT}(make=)",
            fix="turn off clipping in the optimizer, and use model.clip_grad_norm_; a step size "
            "that is estimated from all parameters, as by Prodigy, cannot be used on shards",
        )
