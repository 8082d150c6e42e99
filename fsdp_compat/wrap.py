"""Which submodules become units of their own: the wrap policies, `enable_wrap`/`wrap`, and the plan
made from a policy.

A policy is one of two things:

    a function  ``(module, recurse, nonwrapped_numel) -> bool``, asked on the way down with
    ``recurse=True`` (may
                this module or one below it become a unit?) and, if so, on the way up with
                ``recurse=False`` (shall this one?), each time with the number of elements below it
                that no unit holds yet
    an object   with ``_run_policy(root_module, ignored_modules, root_kwargs) -> {module: keyword
    arguments}``

Torch's own policies are both kinds, so they work here as they are. `plan_wrapping` decides,
`replace_modules` acts."""

from __future__ import annotations

import contextlib
import functools
import inspect
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from fsdp_compat.errors import StateError, TypeUsageError, UsageError, explain, truth

__all__ = [
    "CustomPolicy",
    "ModuleWrapPolicy",
    "always_wrap_policy",
    "enable_wrap",
    "lambda_auto_wrap_policy",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "wrap",
]


class _Policy(ABC):
    """A policy that sees the whole module tree at once."""

    @abstractmethod
    def _run_policy(
        self,
        root_module: nn.Module,
        ignored_modules: set[nn.Module],
        root_kwargs: dict[str, Any],
    ) -> dict[nn.Module, dict[str, Any]]:
        """Return the chosen modules, each with keyword arguments of its own; the arguments are not
        changed."""


class ModuleWrapPolicy(_Policy):
    """Choose every module that is an instance of one of ``module_classes``, with the keyword
    arguments of the root.

    It can also be called like a policy function.

    Raises:
        UsageError: ``module_classes`` holds something else than classes; also a TypeError.
    """

    def __init__(self, module_classes: Iterable[type[nn.Module]]) -> None:
        self._module_classes: set[type[nn.Module]] = set(
            _classes(module_classes, "ModuleWrapPolicy(...)")
        )

    def _run_policy(
        self,
        root_module: nn.Module,
        ignored_modules: set[nn.Module],
        root_kwargs: dict[str, Any],
    ) -> dict[nn.Module, dict[str, Any]]:
        wanted = tuple(self._module_classes)
        return {
            module: dict(root_kwargs)
            for module in root_module.modules()
            if isinstance(module, wanted) and module not in ignored_modules
        }

    def __call__(self, module: nn.Module, recurse: bool, *args: Any, **kwargs: Any) -> bool:
        """Answer as a policy function does; sizes play no part, so further arguments are not looked
        at."""
        return _module_wrap_policy(module, recurse, -1, self._module_classes)

    def __repr__(self) -> str:
        names = ", ".join(sorted(cls.__name__ for cls in self._module_classes))
        return f"{type(self).__name__}({{{names}}})"


class CustomPolicy(_Policy):
    """Ask ``lambda_fn`` about every module: False leaves it, True chooses it, a dict chooses it
    with other arguments.

    Other answers count by their truth value; a text is refused. The dict is laid over the keyword
    arguments of the root; an empty one leaves the module, as False does. It can also be called like
    a policy function, for callers that pass no keyword arguments on; a dict is refused there.

    Raises:
        UsageError: ``lambda_fn`` cannot be called; also a TypeError.
    """

    def __init__(self, lambda_fn: Callable[[nn.Module], bool | dict[str, Any]]) -> None:
        self._lambda_fn: Callable[[nn.Module], bool | dict[str, Any]] = _function_of_modules(
            lambda_fn, "CustomPolicy(lambda_fn)"
        )

    def _run_policy(
        self,
        root_module: nn.Module,
        ignored_modules: set[nn.Module],
        root_kwargs: dict[str, Any],
    ) -> dict[nn.Module, dict[str, Any]]:
        chosen = {}
        for name, module in root_module.named_modules():
            if module in ignored_modules:
                continue
            answer = self._ask(module, f"module {name!r}" if name else "the root module")
            if answer:
                chosen[module] = {**root_kwargs, **(answer if isinstance(answer, dict) else {})}
        return chosen

    def __call__(self, module: nn.Module, recurse: bool, *args: Any, **kwargs: Any) -> bool:
        """Answer as a policy function does; sizes play no part, so further arguments are not looked
        at."""
        return recurse or bool(
            self._ask(module, "a caller that takes only True or False from a policy", dicts=False)
        )

    def _ask(self, module: nn.Module, where: str, dicts: bool = True) -> bool | dict[str, Any]:
        """dicts: whether a dict is an answer."""
        answer = self._lambda_fn(module)
        if isinstance(answer, dict) and dicts:
            return answer
        if not isinstance(answer, Mapping):
            with contextlib.suppress(UsageError):
                return truth("an answer", answer, where)
        raise UsageError(
            explain(
                "The function of a CustomPolicy gave an answer that cannot be used.",
                expected="True, False or a dict" if dicts else "True or False",
                got=f"{answer!r} of type {type(answer).__name__}",
                where=f"{where}, a {type(module).__name__}",
                fix="Return True or False, or a dict of FullyShardedDataParallel's keyword "
                "arguments to override.",
            )
        )


def always_wrap_policy(*args: Any, **kwargs: Any) -> bool:
    """Choose every module."""
    return True


def lambda_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    lambda_fn: Callable[[nn.Module], bool],
) -> bool:
    """Choose the modules for which ``lambda_fn`` returns true; fix ``lambda_fn`` with
    `functools.partial`."""
    decide = _function_of_modules(lambda_fn, "lambda_auto_wrap_policy(lambda_fn=...)")
    return recurse or decide(module)


def transformer_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    transformer_layer_cls: set[type[nn.Module]],
) -> bool:
    """Choose the instances of ``transformer_layer_cls``, usually the class of a model's repeated
    block.

    What stands outside the blocks, such as an embedding that shares its weight with the output,
    stays with the root. Fix ``transformer_layer_cls`` with `functools.partial`.
    """
    return (
        isinstance(
            module,
            _classes(
                transformer_layer_cls, "transformer_auto_wrap_policy(transformer_layer_cls=...)"
            ),
        )
        or recurse
    )


def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    min_num_params: int = int(1e8),
    force_leaf_modules: set[type[nn.Module]] | None = None,
    exclude_wrap_modules: set[type[nn.Module]] | None = None,
) -> bool:
    """Choose a module once at least ``min_num_params`` elements below it belong to no unit yet.

    Args:
        min_num_params: number of elements, not of parameters.
        force_leaf_modules: classes of which neither the instances nor what is in them is chosen.
            None means the attribute ``FORCE_LEAF_MODULES`` of this function, which a program may
            change.
        exclude_wrap_modules: classes of which the instances are not chosen, but what is in them can
            be. None means the attribute ``EXCLUDE_WRAP_MODULES``.
    """
    defaults: Any = size_based_auto_wrap_policy
    leaves = defaults.FORCE_LEAF_MODULES if force_leaf_modules is None else force_leaf_modules
    excluded = (
        defaults.EXCLUDE_WRAP_MODULES if exclude_wrap_modules is None else exclude_wrap_modules
    )
    leaves = _classes(leaves, "size_based_auto_wrap_policy(force_leaf_modules=...)")
    excluded = _classes(excluded, "size_based_auto_wrap_policy(exclude_wrap_modules=...)")
    try:
        is_large = nonwrapped_numel >= min_num_params
    except TypeError as error:
        raise _unusable(
            "min_num_params", "a number of elements", min_num_params, "size_based_auto_wrap_policy"
        ) from error
    return is_large and not isinstance(module, leaves if recurse else excluded)


# Part of the public contract; a function cannot declare attributes, hence the ignores.
size_based_auto_wrap_policy.FORCE_LEAF_MODULES = {nn.MultiheadAttention}  # type: ignore[attr-defined]
size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES = {nn.ModuleList, nn.ModuleDict}  # type: ignore[attr-defined]


def _module_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    module_classes: set[type[nn.Module]],
) -> bool:
    """Choose the instances of ``module_classes``; the policy function behind `ModuleWrapPolicy`."""
    return (
        isinstance(module, _classes(module_classes, "_module_wrap_policy(module_classes=...)"))
        or recurse
    )


def _wrap_module_cls_individually(
    module: nn.Module, module_classes: Sequence[type], recurse: bool, *args: Any, **kwargs: Any
) -> bool:
    """Choose the instances of ``module_classes``, in the order of arguments that `_or_policy`
    members can have."""
    return (
        isinstance(
            module, _classes(module_classes, "_wrap_module_cls_individually(module_classes=...)")
        )
        or recurse
    )


def _or_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    policies: Iterable[Callable[..., bool]],
) -> bool:
    """Answer true as soon as one of the policy functions does; fix ``policies`` with
    `functools.partial`."""
    return any(
        answers(module=module, recurse=recurse, nonwrapped_numel=nonwrapped_numel)
        for answers in policies
    )


class _NestedEnableWrapError(StateError, NotImplementedError):
    """`enable_wrap` inside `enable_wrap`; torch's type for it is NotImplementedError."""


# Wrapper and keyword arguments of the `enable_wrap` block that is open, if one is.
_enabled: tuple[Callable[..., nn.Module], dict[str, Any]] | None = None


@contextlib.contextmanager
def enable_wrap(*, wrapper_cls: Any, **wrapper_kwargs: Any) -> Iterator[None]:
    """Make `wrap` wrap with ``wrapper_cls(module, **wrapper_kwargs)`` inside the with block, and
    only there.

    A model whose constructor uses `wrap` on its large layers is then sharded layer by layer as it
    is built, and is an ordinary model when it is built outside the block. The setting is one for
    the whole process, so all threads see it.

    Raises:
        UsageError: ``wrapper_cls`` cannot be called.
        StateError: the block stands inside another one; also a NotImplementedError.
    """
    global _enabled
    if not callable(wrapper_cls):
        raise UsageError(
            explain(
                "enable_wrap got a wrapper_cls that cannot be called.",
                expected="a class or function that takes a module and keyword arguments",
                got=repr(wrapper_cls),
                where="argument 'wrapper_cls'",
                fix="Pass wrapper_cls=FullyShardedDataParallel.",
            )
        )
    if _enabled is not None:
        raise _NestedEnableWrapError(
            explain(
                "enable_wrap cannot stand inside another enable_wrap.",
                expected="no enable_wrap block around this one",
                got=f"a block with wrapper_cls={_enabled[0]!r}",
                where=f"enable_wrap(wrapper_cls={wrapper_cls!r})",
                fix="Leave the outer block first, or give single modules other settings: "
                "wrap(module, name=value).",
            )
        )
    _enabled = (wrapper_cls, wrapper_kwargs)
    try:
        yield
    finally:
        _enabled = None


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """Return ``module`` wrapped as the `enable_wrap` block around the call says, or ``module``
    itself outside of one.

    ``wrap_overrides`` go before the keyword arguments of the block.
    """
    if _enabled is None:
        return module
    wrapper_cls, kwargs = _enabled
    return wrapper_cls(module, **{**kwargs, **wrap_overrides})


def plan_wrapping(
    root: nn.Module,
    policy: Any,
    ignored_modules: Collection[nn.Module],
    ignored_parameters: Collection[nn.Parameter],
    root_kwargs: Mapping[str, Any],
    is_wrapped: Callable[[nn.Module], bool] = lambda module: False,
) -> dict[nn.Module, dict[str, Any]]:
    """Return which submodules of ``root`` become units, children before parents, with the keyword
    arguments of each.

    Nothing is changed. The modules are those that torch would choose; a module that stands in
    several places is one unit. If ``root_kwargs["mixed_precision"]`` is not None, the instances of
    its `_module_classes_to_ignore` are chosen as well, with ``mixed_precision=None``, and a policy
    function is not asked how far down to look, as in torch.

    Never chosen, whatever the policy says:
        the root, which the caller wraps ignored modules a module all of whose parameters, if it has
        any, are ignored or below a module that `is_wrapped`: as a unit it would do nothing the
        output projection of an `nn.MultiheadAttention`: its forward is never called, so nothing
        would gather it

    Args:
        policy: a policy function or object, ours or torch's.
        ignored_modules: all of them, descendants included.
        ignored_parameters: not counted in what a policy function is told; nor are those of wrapped
            modules.
        root_kwargs: copied, not shared, into each unit's arguments, under what a policy object says
            of the module.
        is_wrapped: whether a module is a unit already.

    Raises:
        UsageError: ``policy`` is not a policy, was given what it cannot use, or answers something
            else than a policy does.
    """
    run_policy = getattr(policy, "_run_policy", None)
    if isinstance(policy, type) or not (callable(run_policy) or callable(policy)):
        raise _not_a_policy(policy, root)
    wrapped = (module for module in root.modules() if module is not root and is_wrapped(module))
    skipped_parameters = {
        *ignored_parameters,
        *(parameter for module in wrapped for parameter in module.parameters()),
    }
    never_called = _never_called(root)

    def may_be_unit(module: nn.Module) -> bool:
        return (
            module is not root
            and module not in ignored_modules
            and module not in never_called
            and any(parameter not in skipped_parameters for parameter in module.parameters())
        )

    mixed_precision = root_kwargs.get("mixed_precision")
    unmixed = () if mixed_precision is None else tuple(mixed_precision._module_classes_to_ignore)
    chosen: dict[nn.Module, Mapping[str, Any]]
    if callable(run_policy):
        answer = run_policy(root, set(ignored_modules), dict(root_kwargs))
        chosen = _checked_plan(
            answer, root, f"{type(policy).__name__}._run_policy, called for a {type(root).__name__}"
        )
        for module in root.modules():
            if isinstance(module, unmixed):
                chosen.setdefault(module, root_kwargs)
    else:
        policy = _checked_function(policy)
        if mixed_precision is not None:
            alone = functools.partial(_wrap_module_cls_individually, module_classes=unmixed)
            policy = functools.partial(_or_policy, policies=(policy, alone))
        units, _ = _ask_function(policy, root, ignored_modules, skipped_parameters, may_be_unit)
        chosen = dict.fromkeys(units, root_kwargs)
    return {
        module: {**chosen[module], "mixed_precision": None}
        if isinstance(module, unmixed)
        else dict(chosen[module])
        for module in _children_first(root)
        if module in chosen and may_be_unit(module)
    }


def replace_modules(
    root: nn.Module,
    plan: Mapping[nn.Module, Mapping[str, Any]],
    make_unit: Callable[..., nn.Module],
) -> nn.Module:
    """Put ``make_unit(module, **kwargs)`` in every place of each planned module, in the order of
    the plan.

    Return ``root``, or what it became if the plan holds it. A module that stands in several places
    is made into one unit, which then stands in all of them.
    """
    places: dict[nn.Module, list[tuple[nn.Module, str]]] = {module: [] for module in plan}
    for path, module in root.named_modules(remove_duplicate=False):
        if module in places and module is not root:
            parent, _, name = path.rpartition(".")
            places[module].append((root.get_submodule(parent), name))
    for module, kwargs in plan.items():
        unit = make_unit(module, **kwargs)
        for parent_module, name in places[module]:
            setattr(parent_module, name, unit)
        if module is root:
            root = unit
    return root


def _recursive_wrap(
    module: nn.Module,
    auto_wrap_policy: Callable[..., bool],
    wrapper_cls: Callable[..., nn.Module],
    ignored_modules: set[nn.Module],
    ignored_params: set[nn.Parameter],
    only_wrap_children: bool = False,
    **kwargs: Any,
) -> tuple[nn.Module, int]:
    """Wrap what a policy function chooses at and below ``module``, with any wrapper, in place.

    Return ``module`` or its wrapper, and the number of elements that are in wrapped modules now.
    Unlike `plan_wrapping` this chooses modules without parameters too: the wrapper need not be one
    that shards.

    Args:
        only_wrap_children: whether ``module`` itself is left alone.
        kwargs: what every call of ``wrapper_cls`` is given beside the module.

    Raises:
        UsageError: an instance of ``wrapper_cls`` is in ``module`` already, ignored modules apart.
    """
    for name, inner in module.named_modules():
        if (
            isinstance(wrapper_cls, type)
            and isinstance(inner, wrapper_cls)
            and inner not in ignored_modules
        ):
            raise UsageError(
                explain(
                    f"A module to wrap with {wrapper_cls.__name__} holds one that is wrapped "
                    "already.",
                    expected=f"no instance of {wrapper_cls.__name__} at or below the module",
                    got=f"one, in a {type(module).__name__}",
                    where=f"submodule {name!r}" if name else "the module itself",
                    fix="Wrap either by hand or by policy, or put the wrapped module into "
                    "ignored_modules.",
                )
            )
    units, numel = _ask_function(
        _checked_function(auto_wrap_policy),
        module,
        ignored_modules,
        ignored_params,
        may_be_unit=lambda inner: not (only_wrap_children and inner is module),
    )
    plan = {inner: kwargs for inner in _children_first(module) if inner in units}
    return replace_modules(module, plan, wrapper_cls), numel


def _ask_function(
    policy: Callable[..., bool],
    root: nn.Module,
    ignored_modules: Collection[nn.Module],
    ignored_parameters: Collection[nn.Parameter],
    may_be_unit: Callable[[nn.Module], bool],
) -> tuple[set[nn.Module], int]:
    """Return what a policy function chooses at and below ``root``, and how many elements the chosen
    modules hold.

    Each module is asked about once. What is left for a module is its own count less the counts of
    its children; a parameter that two children share is taken off twice, as in torch.
    """
    units: set[nn.Module] = set()
    numel_in_units: dict[nn.Module, int] = {}

    def visit(module: nn.Module) -> int:
        if module in numel_in_units:
            return numel_in_units[module]
        numel = sum(
            parameter.numel()
            for parameter in module.parameters()
            if parameter not in ignored_parameters
        )
        below = 0
        if policy(module=module, recurse=True, nonwrapped_numel=numel):
            below = sum(visit(child) for child in module.children() if child not in ignored_modules)
            if may_be_unit(module) and policy(
                module=module, recurse=False, nonwrapped_numel=numel - below
            ):
                units.add(module)
                below = numel
        numel_in_units[module] = below
        return below

    return units, visit(root)


def _children_first(root: nn.Module) -> Iterator[nn.Module]:
    """Yield every module at and below ``root`` once, in order of registration, each after what it
    contains."""
    seen = {root}

    def visit(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            if child not in seen:
                seen.add(child)
                yield from visit(child)
        yield module

    yield from visit(root)


def _never_called(root: nn.Module) -> set[nn.Module]:
    """Return the output projections of the attentions below ``root``: their weights are read, their
    forward is not."""
    return {
        child
        for module in root.modules()
        if isinstance(module, nn.MultiheadAttention)
        for child in module.children()
        if isinstance(child, NonDynamicallyQuantizableLinear)
    }


# What policies are given and answer.


def _unusable(what: str, expected: str, got: object, where: str, fix: str = "") -> TypeUsageError:
    shown = (
        f"a {type(got).__name__}"
        if isinstance(got, nn.Module)
        else f"{textwrap.shorten(repr(got), 300)} of type {type(got).__name__}"
    )
    return TypeUsageError(
        explain(
            f"{what} cannot be used.",
            expected=expected,
            got=shown,
            where=where,
            fix=fix or f"Give {expected}.",
        )
    )


def _classes(given: Any, call: str) -> tuple[type, ...]:
    """Return ``given`` as `isinstance` takes it. call: how it was given, with ``...`` in its
    place."""
    try:
        classes = tuple(given)
        isinstance(None, classes)
    except TypeError as error:
        fix = f"Pass {call.replace('...', _as_set(given))}."
        raise _unusable(
            "A policy's choice of modules", "a set of classes of modules", given, call, fix
        ) from error
    return classes


def _as_set(given: Any) -> str:
    """Spell the set of classes that was probably meant."""
    items = given if isinstance(given, (set, frozenset, list, tuple)) else [given]
    meant = [item for item in items if isinstance(item, (str, type, nn.Module))]
    names = [
        item if isinstance(item, str) else getattr(item, "__name__", type(item).__name__)
        for item in meant
    ]
    return f"{{{', '.join(names) or 'Block'}}}"


def _function_of_modules(function: Any, where: str) -> Callable[[nn.Module], Any]:
    if callable(function):
        return function
    raise _unusable("lambda_fn", "a function of one module", function, where)


def _checked_function(policy: Callable[..., Any]) -> Callable[..., bool]:
    """Return a policy function with its answers checked; raises UsageError for one that takes other
    arguments.

    As in torch, anything with a truth value is an answer, but not a text or a dict: they mean
    something else.
    """
    try:
        accept: Callable[..., object] = inspect.signature(policy, follow_wrapped=False).bind
    except (TypeError, ValueError):  # it does not say what it takes
        accept = dict
    try:
        accept(module=None, recurse=True, nonwrapped_numel=0)
    except TypeError as error:
        expected = "a function (module, recurse, nonwrapped_numel) -> bool, called with these names"
        fix = "Name its arguments so, and fix further ones with functools.partial."
        raise _unusable(
            "auto_wrap_policy", expected, policy, f"the call of auto_wrap_policy: {error}", fix
        ) from error

    def answer_to(**question: Any) -> bool:
        answer = policy(**question)
        if isinstance(answer, (str, Mapping)):
            where = f"auto_wrap_policy, asked about a {type(question['module']).__name__}"
            fix = (
                "Return True or False; to choose keyword arguments, too, make a CustomPolicy of "
                "a function of the module."
            )
            raise _unusable("A policy's answer", "True or False", answer, where, fix)
        return bool(answer)

    return answer_to


def _checked_plan(plan: Any, root: nn.Module, where: str) -> dict[nn.Module, Mapping[str, Any]]:
    """Return what a policy object has chosen; raises UsageError for anything but modules of
    ``root`` with keyword arguments."""
    if not isinstance(plan, Mapping):
        raise _unusable(
            "A policy's answer", "a dict from modules to dicts of keyword arguments", plan, where
        )
    modules = set(root.modules())
    for module, kwargs in plan.items():
        if module not in modules:
            raise _unusable(
                "A policy's choice of modules",
                "modules of the model that is wrapped",
                module,
                where,
            )
        if not isinstance(kwargs, Mapping):
            raise _unusable(
                "A policy's choice of arguments", "a dict of keyword arguments", kwargs, where
            )
        for name in kwargs:
            if not isinstance(name, str):
                raise _unusable(
                    "A policy's choice of arguments", "names of keyword arguments", name, where
                )
    return dict(plan)


def _not_a_policy(policy: object, root: nn.Module) -> UsageError:
    fix = "Pass a policy, such as ModuleWrapPolicy({Block})."
    if isinstance(policy, type):
        fix = (
            f"Pass ModuleWrapPolicy({_as_set(policy)})."
            if issubclass(policy, nn.Module)
            else f"Pass {policy.__name__}(...)."
        )
    elif isinstance(policy, (set, frozenset, list, tuple)):
        fix = f"Pass ModuleWrapPolicy({_as_set(policy)})."
    return UsageError(
        explain(
            "auto_wrap_policy is not a policy.",
            expected="a ModuleWrapPolicy, a CustomPolicy, or a function (module, recurse, "
            "nonwrapped_numel) -> bool",
            got=f"{policy!r} of type {type(policy).__name__}",
            where=f"wrapping a {type(root).__name__}",
            fix=fix,
        )
    )
