"""The functions of torch.distributed.checkpoint.state_dict, for models with our instances in them.

They have torch's names, arguments, options and results. In the full form everything is whole when
it leaves our state dicts, in the sharded form values are boxes, so none of torch's gathering or
distributing runs over them. Where torch's would lose something, these are right: an optimizer that
has made no step yet is as it was after it was asked for its state, and with ``full_state_dict`` and
``cpu_offload``, which leave the dict on rank 0 alone, it is loaded from there."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import importlib.metadata
import typing
import warnings
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from .. import _torch_private
from .._state.entries import copied
from .._state.formats import BoxedTensor
from .._state.forms import state_dict_type
from .._state.model import store_of
from .._state.model_units import model_unit_of, model_units_in, units_of
from .._state.names import clean_name
from .._state.optim_state_dict import export_optim_state, form_set, optim_state_dict_to_load
from .._state.optimizers import convert
from .._state.rank0 import Rank0Broadcast
from .._state.rank_local import RankState
from ..api import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from ..errors import CheckpointError, RuntimeUsageError, UsageError, explain, wrong_type

__all__ = ["FUNCTIONS", "mixed", "unknown_argument"]

_PACKAGE = __name__.partition(".")[0]


@dataclasses.dataclass(frozen=True)
class _Options:
    """What torch's StateDictOptions say, in the words used here."""

    full: bool = False
    cpu_offload: bool = False
    ignore_frozen: bool = False
    keep_prefixes: bool = True
    strict: bool = True
    from_rank0: bool = False
    flatten: bool = False

    @property
    def on_rank0(self) -> bool:
        """True if only rank 0 gets a dict, or needs one."""
        return self.full and (self.cpu_offload or self.from_rank0)


_FIELDS = {
    "full_state_dict": "full",
    "cpu_offload": "cpu_offload",
    "ignore_frozen_params": "ignore_frozen",
    "keep_submodule_prefixes": "keep_prefixes",
    "strict": "strict",
    "broadcast_from_rank0": "from_rank0",
    "flatten_optimizer_state_dict": "flatten",
}
_IGNORED = {"dsd_fqn_modifiers"}  # state dicts have the names that their modules' own hooks give


def _resolve(options: Any, call: str) -> _Options:
    if options is None:
        return _Options()
    if not dataclasses.is_dataclass(options) or isinstance(options, type):
        raise wrong_type("options", "a StateDictOptions, or None", options, call)
    for field in dataclasses.fields(options):
        if (
            field.name not in (*_FIELDS, *_IGNORED)
            and getattr(options, field.name) != field.default
        ):
            raise unknown_argument(f"options.{field.name}", call)
    found = _Options(
        **{
            ours: bool(getattr(options, field))
            for field, ours in _FIELDS.items()
            if hasattr(options, field)
        }
    )
    if found.from_rank0 and not found.full:
        raise UsageError(
            explain(
                "Loading from rank 0 needs a full state dict.",
                expected="full_state_dict=True with broadcast_from_rank0=True",
                got="full_state_dict=False",
                where=f"{call}(..., options=StateDictOptions(...))",
                fix="set both, or leave broadcast_from_rank0 out: sharded values need no rank 0",
            )
        )
    return found


def unknown_argument(name: str, call: str) -> UsageError:
    """The error for what the installed torch's function takes, and ours does not know."""
    return UsageError(
        explain(
            f"torch {torch.__version__} has something that {_PACKAGE} {_version()} does not know: "
            f"{name}.",
            expected=f"a call without {name}, or a {_PACKAGE} that was made for this torch",
            got=f"{name}, for a model with a FullyShardedDataParallel of {_PACKAGE} in it",
            where=call,
            fix=f"update {_PACKAGE}, or use FullyShardedDataParallel.state_dict_type(...) with "
            "state_dict()",
        )
    )


def mixed(call: str) -> UsageError:
    """The error for a model with instances of torch's FSDP beside ours."""
    return UsageError(
        explain(
            f"The model has FullyShardedDataParallel modules of torch and of {_PACKAGE}.",
            expected="modules of one of them",
            got="both",
            where=call,
            fix="import FullyShardedDataParallel from one place, or take the state dicts of the "
            "parts one by one",
        )
    )


def _version() -> str:
    try:
        return importlib.metadata.version(_PACKAGE)
    except importlib.metadata.PackageNotFoundError:  # it is imported from where its sources are
        return "(not installed)"


# --- names ----------------------------------------------------------------------------------------


class _Names:
    """The names that torch's functions use, which are without the parts of compilers and
    DistributedDataParallel, and our own."""

    def __init__(self, model: nn.Module) -> None:
        self.of_module: dict[nn.Module, str] = {}
        self._public, self._own = {"": ""}, {"": ""}
        by_path: dict[str, nn.Module] = {}
        public_path: dict[str, str] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            by_path[path] = module
            above, _, part = path.rpartition(".")
            if not path:
                public = ""
            elif not clean_name(part) or _torch_private.wraps_as(by_path[above]) == part:
                public = public_path[above]
            else:
                public = f"{public_path[above]}.{part}".lstrip(".")
            public_path[path] = public
            self.of_module.setdefault(module, public)
            self._public[clean_name(path)] = public
            self._own[public] = clean_name(path)  # the innermost of the modules that have one name

    def public(self, own: str) -> str:
        """Return torch's name of a parameter, buffer or module, given what our state dicts call
        it."""
        return _with_head(own, self._public)

    def own(self, public: str) -> str:
        """Return what our state dicts call something, given torch's name."""
        return _with_head(public, self._own)


def _with_head(name: str, heads: Mapping[str, str]) -> str:
    """Replace the longest part of a name that is a module's."""
    head = name.rpartition(".")[0]
    while head not in heads:
        head = head.rpartition(".")[0]
    return f"{heads[head]}.{name[len(head) :].lstrip('.')}".lstrip(".")


def _names_of_targets(model: nn.Module) -> dict[nn.Parameter, list[list[str]]]:
    """What every parameter that an optimizer may hold is: of each parameter of the model all its
    names, the first one first."""
    found: dict[nn.Parameter, list[list[str]]] = {}
    for named in units_of(model):
        for group in named.unit.groups:
            members = store_of(group).orig_params
            for target, indices in group.store.sharded_params:
                found[target] = [
                    [named.prefix + clean_name(name) for name in members[i].names] for i in indices
                ]
    plain: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter not in found:
            plain.setdefault(parameter, []).append(clean_name(name))
    return {**found, **{parameter: [names] for parameter, names in plain.items()}}


# --- the form -------------------------------------------------------------------------------------


@contextlib.contextmanager
def _form(model: nn.Module, options: _Options, model_on_rank0: bool) -> Generator[None, None, None]:
    """Inside of it, our state dicts have the form that was asked for."""
    if options.full:
        kind = StateDictType.FULL_STATE_DICT
        config: Any = FullStateDictConfig(
            offload_to_cpu=options.cpu_offload, rank0_only=model_on_rank0
        )
        optim: Any = FullOptimStateDictConfig(
            offload_to_cpu=options.cpu_offload, rank0_only=options.on_rank0
        )
    else:
        kind = StateDictType.SHARDED_STATE_DICT
        config = ShardedStateDictConfig(offload_to_cpu=options.cpu_offload)
        optim = ShardedOptimStateDictConfig(offload_to_cpu=options.cpu_offload)
    with state_dict_type(model, kind, config, optim):
        yield


def _is_first(model: nn.Module) -> bool:
    return model_units_in(model)[0].mesh.is_first


def _finished(value: Any, options: _Options, live: Collection[int] = ()) -> Any:
    """What our state dicts pass on as it is: parameters that no unit manages. Collective if one is
    a DTensor.

    live: the storages of which nothing goes out with ``cpu_offload``, only copies.
    """
    if options.full and isinstance(value, DTensor):
        value = value.full_tensor()
    if (
        not options.cpu_offload
        or not isinstance(value, torch.Tensor)
        or isinstance(value, BoxedTensor)
        or value.is_meta
    ):
        return value
    return (
        copied(value, to_cpu=True)
        if value.device.type != "cpu" or _torch_private.storage_key(value) in live
        else value
    )


def _live_storages(model: nn.Module) -> set[int]:
    return {
        _torch_private.storage_key(tensor) for tensor in (*model.parameters(), *model.buffers())
    }


def _each(
    optimizers: Optimizer | Iterable[Optimizer], call: str, needed: bool = True
) -> tuple[Optimizer, ...]:
    found = (optimizers,) if isinstance(optimizers, Optimizer) else tuple(optimizers)
    for optimizer in found:
        if not isinstance(optimizer, Optimizer):
            raise wrong_type("optimizers", "an optimizer, or several", optimizer, call)
    if needed and not found:
        raise RuntimeUsageError(
            explain(
                "There is no optimizer.",
                expected="at least one",
                got="none",
                where=call,
                fix="pass the model's optimizer",
            )
        )
    return found


# --- out of the model and the optimizer -----------------------------------------------------------


@torch.no_grad()
def get_model_state_dict(
    model: nn.Module, *, submodules: Collection[nn.Module] | None = None, options: Any = None
) -> dict[str, Any]:
    """Return the model's state dict. Collective in the full form."""
    return _get_model(model, submodules, _resolve(options, "get_model_state_dict"))


@torch.no_grad()
def get_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizer | Iterable[Optimizer],
    *,
    submodules: Collection[nn.Module] | None = None,
    options: Any = None,
) -> dict[str, Any]:
    """Return the optimizers' state by names. ``submodules`` change nothing, as in torch. Collective
    in the full form."""
    call = "get_optimizer_state_dict"
    return _get_optimizers(model, _each(optimizers, call), _resolve(options, call))


@torch.no_grad()
def get_state_dict(
    model: nn.Module,
    optimizers: Optimizer | Iterable[Optimizer],
    *,
    submodules: Collection[nn.Module] | None = None,
    options: Any = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the model's state dict and that of the optimizers. Collective in the full form."""
    resolved = _resolve(options, "get_state_dict")
    found = _each(optimizers, "get_state_dict", needed=False)
    return _get_model(model, submodules, resolved), _get_optimizers(
        model, found, resolved
    ) if found else {}


def _get_model(
    model: nn.Module, submodules: Collection[nn.Module] | None, options: _Options
) -> dict[str, Any]:
    names = _Names(model)
    prefixes = [names.of_module[module] for module in submodules or () if module in names.of_module]
    frozen = _frozen(model, names) if options.ignore_frozen else set()

    def is_wanted(name: str) -> bool:
        return name not in frozen and (
            not submodules or any(_is_below(name, prefix) for prefix in prefixes)
        )

    get = _torch_private.unpatched(model, "state_dict")
    if options.full and model_unit_of(model) is not None and (frozen or submodules):
        get = functools.partial(
            get, filter=lambda name: is_wanted(names.public(name))
        )  # what is not wanted is not gathered
    with _form(model, options, model_on_rank0=options.full and options.cpu_offload):
        state = get()
    live = _live_storages(model) if options.cpu_offload else ()
    found: collections.OrderedDict[str, Any] = collections.OrderedDict(
        (names.public(key), _finished(value, options, live)) for key, value in state.items()
    )
    if options.full and options.cpu_offload and not _is_first(model):
        return {}
    if not submodules:
        setattr(found, "_metadata", getattr(state, "_metadata", None))
    else:
        warnings.warn(
            "The argument submodules is deprecated: filter the state dict by names instead.",
            FutureWarning,
            stacklevel=6,
        )
    for name in [name for name in found if not is_wanted(name)]:
        del found[name]
    if not options.keep_prefixes:
        for prefix in prefixes:
            for name in [name for name in found if prefix and _is_below(name, prefix)]:
                found[name[len(prefix) + 1 :]] = found.pop(name)
    return found


def _is_below(name: str, prefix: str) -> bool:
    return not prefix or name.startswith(f"{prefix}.")


def _frozen(model: nn.Module, names: _Names) -> set[str]:
    """The names of parameters that are not trained."""
    held = _names_of_targets(model)
    return {
        names.public(name)
        for target, its in held.items()
        if not target.requires_grad
        for each in its
        for name in each
    }


def _get_optimizers(
    model: nn.Module, optimizers: Iterable[Optimizer], options: _Options
) -> dict[str, Any]:
    names = _Names(model)
    result: dict[str, Any] = {"state": {}, "param_groups": []}
    for optimizer in optimizers:
        convert(optimizer)
        with _form(model, options, model_on_rank0=options.on_rank0):
            get = _torch_private.unpatched(optimizer, "state_dict")
            where = "get_optimizer_state_dict(model, optimizers)"
            form, groups = form_set(model), optimizer.param_groups
            found = export_optim_state(
                model, optimizer, groups, get(), **form, group=None, where=where, first_step=True
            )
        result["state"].update(
            (names.public(name), {key: _finished(value, options) for key, value in entry.items()})
            for name, entry in found.get("state", {}).items()
        )
        result["param_groups"] += [
            {**group, "params": [names.public(name) for name in group["params"]]}
            for group in found.get("param_groups", ())
        ]
    if options.on_rank0 and not _is_first(model):
        return {}
    return _flattened(result) if options.flatten else result


def _flattened(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return {"state.<parameter>.<key>": value, "param_groups.<parameter>.<key>": value}, which has
    no nested dicts."""
    found: dict[str, Any] = {}

    def add(prefix: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for key, inner in value.items():
                add(f"{prefix}.{key}", inner)
        elif isinstance(value, (torch.Tensor, int, float, RankState)):
            found[prefix] = value
        else:
            raise NotImplementedError(
                explain(
                    "This optimizer's state cannot be flattened.",
                    expected="tensors, numbers and dicts of them",
                    got=f"a {type(value).__name__}",
                    where=prefix,
                    fix="leave flatten_optimizer_state_dict out",
                )
            )

    for name, entry in state["state"].items():
        add(f"state.{name}", entry)
    for group in state["param_groups"]:
        for name in group["params"]:
            found.update(
                (f"param_groups.{name}.{key}", value)
                for key, value in group.items()
                if key != "params"
            )
    return found


# --- into the model and the optimizer -------------------------------------------------------------


@torch.no_grad()
def set_model_state_dict(
    model: nn.Module, model_state_dict: Mapping[Any, Any], *, options: Any = None
) -> Any:
    """Load the model's state dict; return the missing and unexpected keys. Collective if rank 0
    alone has it."""
    return _set_model(model, model_state_dict, _resolve(options, "set_model_state_dict"))


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
    for optimizer, loadable in _loadable(
        model, _each(optimizers, call), optim_state_dict, _resolve(options, call)
    ):
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
    them.

    A dict that does not fit the optimizers is refused before the model changes.
    """
    resolved = _resolve(options, "set_state_dict")
    loadable = _loadable(
        model, _each(optimizers, "set_state_dict", needed=False), optim_state_dict, resolved
    )
    wanted = bool(model_state_dict) or resolved.on_rank0
    answer = (
        _set_model(model, model_state_dict, resolved) if wanted else nn.Module().load_state_dict({})
    )
    for optimizer, its in loadable:
        _torch_private.unpatched(optimizer, "load_state_dict")(its)
    return answer


def _set_model(model: nn.Module, state: Mapping[Any, Any], options: _Options) -> Any:
    names = _Names(model)
    given = {names.own(key): value for key, value in _by_names(state, names).items()}
    if not given and not options.on_rank0:
        if options.strict:
            raise _empty("model state dict")
        return nn.Module().load_state_dict({})
    with _form(model, options, model_on_rank0=options.on_rank0):
        answer = _torch_private.unpatched(model, "load_state_dict")(given, strict=options.strict)
    for keys in answer:
        keys[:] = [names.public(key) for key in keys]
    return answer


def _by_names(state: Mapping[Any, Any], names: _Names) -> dict[str, Any]:
    """``state`` may be by modules, too: {module: its state dict}."""
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
    options: _Options,
) -> list[tuple[Optimizer, dict[str, Any]]]:
    """Return what each optimizer's ``load_state_dict`` takes. Nothing changes yet.

    Collective, as ``optim_state_dict_to_load`` is: what one rank refuses, all refuse.
    """
    names, held = _Names(model), _names_of_targets(model)
    first = model_units_in(model)[0]
    ranks = Rank0Broadcast(first.mesh, first.device)
    found = []
    for optimizer in optimizers:
        convert(optimizer)
        part, refused = None, None
        try:
            if state:
                part = _part_of(state, optimizer, names, held, options.strict)
            elif not options.on_rank0:
                raise _empty("optimizer state dict")
        except CheckpointError as error:
            refused = error
        texts = [text for text in ranks.gather("" if refused is None else str(refused)) if text]
        if refused is not None or texts:
            raise refused or CheckpointError(texts[0])
        with _form(model, options, model_on_rank0=options.on_rank0):
            loadable = optim_state_dict_to_load(model, optimizer, typing.cast(Any, part))
        found.append((optimizer, loadable))
    return found


def _part_of(
    state: Mapping[str, Any],
    optimizer: Optimizer,
    names: _Names,
    held: Mapping[nn.Parameter, list[list[str]]],
    strict: bool,
) -> Mapping[str, Any]:
    """Return what of a dict by torch's names belongs to one optimizer, by our names. By numbers it
    is returned as it is."""
    if "state" not in state:
        state = _unflattened(state, optimizer, names, held)
    if all(isinstance(key, int) for key in state["state"]) and any(
        isinstance(number, int) for group in state["param_groups"] for number in group["params"]
    ):
        return state
    first: dict[str, str] = {}  # {any of a parameter's names for torch: our first one}
    needed: dict[str, bool] = {}
    for group in optimizer.param_groups:
        for target in group["params"]:
            for its in held.get(target, ()):
                first.update((names.public(name), its[0]) for name in its)
                needed[its[0]] = target.requires_grad
    entries = {first[name]: entry for name, entry in state["state"].items() if name in first}
    missing = [name for name, trained in needed.items() if trained and name not in entries]
    if strict and missing and state["state"]:
        raise CheckpointError(
            explain(
                "The optimizer state dict has no state for some of the parameters.",
                expected=f"state for the {sum(needed.values())} parameters of "
                f"{type(optimizer).__name__} that are trained",
                got=f"none for {len(missing)}, such as {names.public(missing[0])!r}",
                where="the 'state' of the optimizer state dict",
                fix="load the state that was saved with this model, or allow it with "
                "StateDictOptions(strict=False)",
            )
        )
    groups = [
        {**group, "params": [first[name] for name in group["params"] if name in first]}
        for group in state["param_groups"]
        if not group["params"] or any(name in first for name in group["params"])
    ]
    return {"state": entries, "param_groups": groups}


def _unflattened(
    state: Mapping[str, Any],
    optimizer: Optimizer,
    names: _Names,
    held: Mapping[nn.Parameter, list[list[str]]],
) -> dict[str, Any]:
    """Undo ``_flattened`` for the parameters of one optimizer."""
    known = {
        names.public(name)
        for target in _targets(optimizer)
        for its in held.get(target, ())
        for name in its
    }
    entries: dict[str, dict[str, Any]] = {}
    settings: dict[str, dict[str, Any]] = {}
    for key, value in state.items():
        kind, _, rest = key.partition(".")
        name, inner = _split(rest, known)
        if name is None:
            continue
        place: dict[str, Any] = (entries if kind == "state" else settings).setdefault(name, {})
        *above, last = inner.split(".")
        for part in above:
            place = place.setdefault(part, {})
        place[last] = value
    groups = []
    for group in optimizer.param_groups:
        its = [
            names.public(name)
            for target in group["params"]
            for parameter in held.get(target, ())
            for name in parameter
        ]
        its = [name for name in its if name in settings or name in entries]
        found = [settings[name] for name in its if name in settings]
        groups.append({**(found[0] if found else {}), "params": its})
    return {"state": entries, "param_groups": groups}


def _targets(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _split(name: str, known: Collection[str]) -> tuple[str | None, str]:
    """Split "<parameter>.<key>" into both; None for a parameter that is not ``known``."""
    head, rest = name, ""
    while head and head not in known:
        head, _, part = head.rpartition(".")
        rest = f"{part}.{rest}" if rest else part
    return head or None, rest


def _empty(what: str) -> CheckpointError:
    return CheckpointError(
        explain(
            f"The {what} is empty.",
            expected="a dict with the names of the model's parameters, on every rank",
            got="{}",
            where="torch.distributed.checkpoint.state_dict",
            fix="load the dict on all ranks, or set full_state_dict=True and "
            "broadcast_from_rank0=True if rank 0 alone has it",
        )
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
