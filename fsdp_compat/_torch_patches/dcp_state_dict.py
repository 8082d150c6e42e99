"""The functions of torch.distributed.checkpoint.state_dict, for models with our units in them.

They have torch's names, arguments, options and results. Our state dicts hold whole tensors in the
full form, and in the sharded one DTensors of ``fully_shard`` and BoxedTensors of flat units, so
torch's gathering and distributing does not run. Losses of torch's functions are avoided: an
optimizer without a step is unchanged after its state was taken, a dict that ``full_state_dict``
with ``cpu_offload`` left on rank 0 alone is loaded from there, and what does not fit is refused
before anything changes."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .. import _torch_private
from .._comm.agreement import raise_together, told
from .._comm.mesh import Mesh
from .._state.forms import state_dict_type
from .._state.held import place_beside
from .._state.model_loading import refuse_values
from .._state.optim_contents import ParamContents, contents_of
from .._state.optim_export import ExportForm, Values, export_optim_state
from .._state.optim_import import import_optim_state
from .._state.optimizer_checks import cut_state
from .._state.rank0 import Rank0Broadcast, common_mesh
from .._state.sharded_values import BoxedTensor, copied
from .._state.units import in_form, is_lazy, model_units_in, units_of, unmanaged_in
from ..api import FullStateDictConfig, ShardedStateDictConfig, StateDictType
from ..errors import CheckpointError, RuntimeUsageError, UsageError, wrong_type
from .dcp_names import Names, flattened, names_in, unflattened

_PACKAGE = __name__.partition(".")[0]


@dataclasses.dataclass(frozen=True)
class Options:
    """torch's StateDictOptions."""

    full_state_dict: bool = False
    cpu_offload: bool = False
    ignore_frozen_params: bool = False
    keep_submodule_prefixes: bool = True
    strict: bool = True
    broadcast_from_rank0: bool = False
    flatten_optimizer_state_dict: bool = False

    @property
    def on_rank0(self) -> bool:
        """True if only rank 0 gets a dict, or needs one."""
        return self.full_state_dict and (self.cpu_offload or self.broadcast_from_rank0)


_FIELDS = {field.name for field in dataclasses.fields(Options)}
_IGNORED = {"dsd_fqn_modifiers"}  # state dicts have the names that their modules' own hooks give


def resolve(options: Any, call: str) -> Options:
    if options is None:
        return Options()
    if not dataclasses.is_dataclass(options) or isinstance(options, type):
        raise wrong_type("options", "a StateDictOptions, or None", options, call)
    for field in dataclasses.fields(options):
        known = field.name in _FIELDS | _IGNORED
        if not known and getattr(options, field.name) != field.default:
            raise unknown_argument(f"options.{field.name}", call)
    given = {name: bool(getattr(options, name)) for name in _FIELDS if hasattr(options, name)}
    found = Options(**given)
    if found.broadcast_from_rank0 and not found.full_state_dict:
        raise UsageError.of(
            "Loading from rank 0 needs a full state dict.",
            expected="full_state_dict=True with broadcast_from_rank0=True",
            got="full_state_dict=False",
            where=f"{call}(..., options=StateDictOptions(...))",
            fix="set both, or leave broadcast_from_rank0 out: sharded values need no rank 0",
        )
    return found


def unknown_argument(name: str, call: str) -> UsageError:
    """Return the error for an argument of the installed torch that ours does not know."""
    return UsageError.of(
        f"torch {torch.__version__} has an argument that {_PACKAGE} does not know: {name}.",
        expected=f"a call without {name} for a model with units of {_PACKAGE}",
        got=name,
        where=call,
        fix=f"update {_PACKAGE}, or use FullyShardedDataParallel.state_dict_type(...) with "
        "state_dict()",
    )


def mixed(call: str) -> UsageError:
    """Return the error for a model with torch's FSDP modules beside ours."""
    return UsageError.of(
        f"The model has FullyShardedDataParallel modules of torch and of {_PACKAGE}.",
        expected="modules of one of them",
        got="both",
        where=call,
        fix="import FullyShardedDataParallel from one place, or take the state dicts of the "
        "parts one by one",
    )


# --- the form -------------------------------------------------------------------------------------


def _form(
    model: nn.Module, options: Options, on_rank0: bool
) -> contextlib.AbstractContextManager[None]:
    """A context in which the model's state dicts have the requested form."""
    kind, config = StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(options.cpu_offload)
    if not options.full_state_dict:
        return state_dict_type(model, kind, config)
    kind, whole = StateDictType.FULL_STATE_DICT, FullStateDictConfig(options.cpu_offload, on_rank0)
    return state_dict_type(model, kind, whole)


def _mesh(model: nn.Module) -> Mesh:
    units = model_units_in(model)
    return common_mesh(units) or units[0].mesh


def _agreed(model: nn.Module, problem: Exception | None, value: object = None) -> list[Any]:
    """Return every rank's ``value``. Collective: what one rank refuses, all refuse."""
    ranks = Rank0Broadcast(_mesh(model), model_units_in(model)[0].device)
    problems, values = zip(*ranks.gather((told(problem), value)), strict=True)
    raise_together(problem, problems, "torch.distributed.checkpoint.state_dict")
    return list(values)


def _finished(value: Any, options: Options, live: Collection[int] = ()) -> Any:
    """Finish an unmanaged value; collective for a DTensor. live: storages that are copied."""
    if options.full_state_dict and _torch_private.is_dtensor(value):
        value = value.full_tensor()
    is_whole = isinstance(value, torch.Tensor) and not isinstance(value, BoxedTensor)
    if not (is_whole and options.cpu_offload) or value.is_meta:
        return value
    is_kept = value.device.type == "cpu" and _torch_private.storage_key(value) not in live
    return value if is_kept else copied(value, to_cpu=True)


def _each(
    optimizers: Optimizer | Iterable[Optimizer], call: str, needed: bool = True
) -> tuple[Optimizer, ...]:
    found = (optimizers,) if isinstance(optimizers, Optimizer) else tuple(optimizers)
    for optimizer in found:
        if not isinstance(optimizer, Optimizer):
            raise wrong_type("optimizers", "an optimizer, or several", optimizer, call)
    if needed and not found:
        raise RuntimeUsageError.of(
            "There is no optimizer.",
            expected="at least one",
            got="none",
            where=call,
            fix="pass the model's optimizer",
        )
    return found


# --- out of the model and the optimizer -----------------------------------------------------------


@torch.no_grad()
def get_model_state_dict(
    model: nn.Module, *, submodules: Collection[nn.Module] | None = None, options: Any = None
) -> dict[str, Any]:
    """Return the model's state dict. Collective in the full form."""
    return _get_model(model, submodules, resolve(options, "get_model_state_dict"))


@torch.no_grad()
def get_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizer | Iterable[Optimizer],
    *,
    submodules: Collection[nn.Module] | None = None,
    options: Any = None,
) -> dict[str, Any]:
    """Return the optimizers' state by names. Collective in the full form."""
    call = "get_optimizer_state_dict"
    return _get_optimizers(model, _each(optimizers, call), resolve(options, call))


@torch.no_grad()
def get_state_dict(
    model: nn.Module,
    optimizers: Optimizer | Iterable[Optimizer],
    *,
    submodules: Collection[nn.Module] | None = None,
    options: Any = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the model's state dict and that of the optimizers. Collective in the full form."""
    resolved = resolve(options, "get_state_dict")
    found = _each(optimizers, "get_state_dict", needed=False)
    of_model = _get_model(model, submodules, resolved)
    return of_model, _get_optimizers(model, found, resolved) if found else {}


def _get_model(
    model: nn.Module, submodules: Collection[nn.Module] | None, options: Options
) -> dict[str, Any]:
    names = Names(model)
    prefixes = [names.of_module[module] for module in submodules or () if module in names.of_module]
    frozen = _frozen(model, names) if options.ignore_frozen_params else set()

    def is_wanted(name: str) -> bool:
        return name not in frozen and (
            not submodules or any(_is_below(name, prefix) for prefix in prefixes)
        )

    on_rank0 = options.full_state_dict and options.cpu_offload
    with (
        _form(model, options, on_rank0),
        in_form(model_units_in(model), wanted=lambda name, _: is_wanted(names.public(name))),
    ):  # what is not wanted is not gathered
        state = _torch_private.unpatched(model, "state_dict")()
    first = not on_rank0 or _mesh(model).is_first
    wholes = dict[str, Any]()
    for slot in unmanaged_in(model) if options.full_state_dict else ():
        name = names.public(slot.name)
        if _torch_private.is_dtensor(slot.value) and is_wanted(name):
            whole = _finished(slot.value, options)  # by all ranks, also those that keep nothing
            wholes |= {name: whole} if first else {}
    if not first:
        return {}
    tensors = (*model.parameters(), *model.buffers()) if options.cpu_offload else ()
    live = {*map(_torch_private.storage_key, tensors)}
    found: collections.OrderedDict[str, Any] = collections.OrderedDict()
    for key, value in state.items():
        if is_wanted(name := names.public(key)):
            found[name] = wholes[name] if name in wholes else _finished(value, options, live)
    if not submodules:
        setattr(found, "_metadata", getattr(state, "_metadata", None))
    else:
        warnings.warn(
            "The argument submodules is deprecated: filter the state dict by names instead.",
            FutureWarning,
            stacklevel=6,
        )
    if not options.keep_submodule_prefixes:
        for prefix in prefixes:
            for name in [name for name in found if prefix and _is_below(name, prefix)]:
                found[name[len(prefix) + 1 :]] = found.pop(name)
    return found


def _is_below(name: str, prefix: str) -> bool:
    return not prefix or name.startswith(f"{prefix}.")


def _frozen(model: nn.Module, names: Names) -> set[str]:
    """The names of parameters that are not trained."""
    return {
        names.public(name)
        for parameter, contents in contents_of(units_of(model), model).items()
        if not parameter.requires_grad
        for its in contents.all_names.values()
        for name in its
    }


def _get_optimizers(
    model: nn.Module, optimizers: Iterable[Optimizer], options: Options
) -> dict[str, Any]:
    names = Names(model)
    has_mesh = any(unit.device_mesh is not None for unit in model_units_in(model))
    values = Values.DTENSORS if has_mesh else Values.BOXES
    values = Values.WHOLE if options.full_state_dict else values
    form = ExportForm(values, options.cpu_offload, options.on_rank0, first_step=True)
    where = "get_optimizer_state_dict(model, optimizers)"
    result: dict[str, Any] = {"state": {}, "param_groups": []}
    for optimizer in optimizers:
        cut_state(optimizer)
        state = _torch_private.unpatched(optimizer, "state_dict")()
        found = export_optim_state(model, optimizer, optimizer.param_groups, state, form, where)
        result["state"].update(
            (names.public(name), {key: _finished(value, options) for key, value in entry.items()})
            for name, entry in found.get("state", {}).items()
        )
        result["param_groups"] += [
            {**group, "params": [names.public(name) for name in group["params"]]}
            for group in found.get("param_groups", ())
        ]
    if options.on_rank0 and not _mesh(model).is_first:
        return {}
    return flattened(result) if options.flatten_optimizer_state_dict else result


# --- into the model and the optimizer -------------------------------------------------------------


@torch.no_grad()
def set_model_state_dict(
    model: nn.Module, model_state_dict: Mapping[Any, Any], *, options: Any = None
) -> Any:
    """Load a state dict; return missing and unexpected keys. Collective if on rank 0 alone."""
    return _set_model(model, model_state_dict, resolve(options, "set_model_state_dict"))


@torch.no_grad()
def set_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizer | Iterable[Optimizer],
    optim_state_dict: Mapping[str, Any],
    *,
    options: Any = None,
) -> None:
    """Load the optimizers' state. Collective if rank 0 alone has it."""
    call = "set_optimizer_state_dict"
    found, resolved = _each(optimizers, call), resolve(options, call)
    for optimizer, loadable in _loadable(model, found, optim_state_dict, resolved):
        _torch_private.unpatched(optimizer, "load_state_dict")(loadable)


@torch.no_grad()
def set_state_dict(
    model: nn.Module,
    optimizers: Optimizer | Iterable[Optimizer],
    *,
    model_state_dict: Mapping[Any, Any],
    optim_state_dict: Mapping[str, Any],
    options: Any = None,
) -> Any:
    """Load both; return the model's missing and unexpected keys. Collective if rank 0 alone has
    them. A dict that does not fit the optimizers is refused before the model changes."""
    resolved = resolve(options, "set_state_dict")
    found = _each(optimizers, "set_state_dict", needed=False)
    loadable = _loadable(model, found, optim_state_dict, resolved)
    answer = nn.Module().load_state_dict({})
    if model_state_dict or resolved.on_rank0:
        answer = _set_model(model, model_state_dict, resolved)
    for optimizer, its in loadable:
        _torch_private.unpatched(optimizer, "load_state_dict")(its)
    return answer


def _set_model(model: nn.Module, state: Mapping[Any, Any], options: Options) -> Any:
    names = Names(model)
    given = {names.own(key): value for key, value in _by_names(state, names).items()}
    if not given and not options.on_rank0:
        if options.strict:
            raise _empty("model state dict")
        return nn.Module().load_state_dict({})
    problem = None
    try:
        if given and any(map(is_lazy, model.modules())):  # a wrapper does so itself
            refuse_values(model, type(model).__name__, given, options.strict)
    except CheckpointError as error:
        problem = error
    is_sent = options.on_rank0 and not all(_agreed(model, problem, bool(given)))
    if problem is not None:
        raise problem
    if not is_sent:
        place_beside(model, given)
    with _form(model, options, is_sent):
        answer = _torch_private.unpatched(model, "load_state_dict")(given, strict=options.strict)
    for keys in answer:
        keys[:] = [names.public(key) for key in keys]
    return answer


def _by_names(state: Mapping[Any, Any], names: Names) -> dict[str, Any]:
    """Return values by name; ``state`` may also map modules to their state dicts."""
    found: dict[str, Any] = {}
    for key, value in (state or {}).items():
        if isinstance(key, nn.Module):
            found.update(
                (f"{names.of_module[key]}.{name}".lstrip("."), inner)
                for name, inner in value.items()
            )
        else:
            found[key] = value
    return found


def _loadable(
    model: nn.Module,
    optimizers: Iterable[Optimizer],
    state: Mapping[str, Any] | None,
    options: Options,
) -> list[tuple[Optimizer, dict[str, Any]]]:
    """Return what each optimizer will load. Collective: what one rank refuses, all refuse."""
    names, held = Names(model), contents_of(units_of(model), model)
    found = []
    for optimizer in optimizers:
        cut_state(optimizer)
        part, refused = None, None
        try:
            if state:
                part = _part_of(state, optimizer, names, held, options.strict)
            elif not options.on_rank0:
                raise _empty("optimizer state dict")
        except CheckpointError as error:
            refused = error
        _agreed(model, refused)
        where = "set_optimizer_state_dict(model, optimizers, optim_state_dict)"
        loadable = import_optim_state(
            *(model, optimizer.param_groups, part, where, optimizer), from_rank0=options.on_rank0
        )
        found.append((optimizer, loadable))
    return found


def _part_of(
    state: Mapping[str, Any],
    optimizer: Optimizer,
    names: Names,
    held: Mapping[nn.Parameter, ParamContents],
    strict: bool,
) -> Mapping[str, Any]:
    """Return one optimizer's part of a dict, by our names; by numbers as it is."""
    if "state" not in state:
        state = unflattened(state, optimizer, names, held)
    if all(isinstance(key, int) for key in state["state"]) and any(
        isinstance(number, int) for group in state["param_groups"] for number in group["params"]
    ):
        return state
    first: dict[str, str] = {}  # {any of a parameter's names for torch: our first one}
    needed: dict[str, bool] = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            for its in names_in(held, param):
                first.update((names.public(name), its[0]) for name in its)
                needed[its[0]] = param.requires_grad
    entries = {first[name]: entry for name, entry in state["state"].items() if name in first}
    missing = [name for name, trained in needed.items() if trained and name not in entries]
    if strict and missing and state["state"]:
        raise CheckpointError.of(
            "The optimizer state dict has no state for some of the parameters.",
            expected=f"state for the {sum(needed.values())} parameters of "
            f"{type(optimizer).__name__} that are trained",
            got=f"none for {len(missing)}, such as {names.public(missing[0])!r}",
            where="the 'state' of the optimizer state dict",
            fix="load the state that was saved with this model, or allow it with "
            "StateDictOptions(strict=False)",
        )
    groups = [
        {**group, "params": [first[name] for name in group["params"] if name in first]}
        for group in state["param_groups"]
        if not group["params"] or any(name in first for name in group["params"])
    ]
    return {"state": entries, "param_groups": groups}


def _empty(what: str) -> CheckpointError:
    return CheckpointError.of(
        f"The {what} is empty.",
        expected="a dict with the names of the model's parameters, on every rank",
        got="{}",
        where="torch.distributed.checkpoint.state_dict",
        fix="load the dict on all ranks, or set full_state_dict=True and "
        "broadcast_from_rank0=True if rank 0 alone has it",
    )


FUNCTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        get_model_state_dict,
        get_optimizer_state_dict,
        get_state_dict,
        set_model_state_dict,
        set_optimizer_state_dict,
        set_state_dict,
    )
}
