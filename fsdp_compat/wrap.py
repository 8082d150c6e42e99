"""Which submodules become units: the wrap policies, and wrapping by hand.

A policy is either

- a function ``(module, recurse, nonwrapped_numel) -> bool``. It is called on the way down with
  ``recurse=True`` (may this module or one below it become a unit?) and, if it returns true, on the
  way up with ``recurse=False`` (does this module become one?). ``nonwrapped_numel`` is the number
  of elements at and below the module that no unit holds yet.
- an object with ``_run_policy(root_module, ignored_modules, root_kwargs)``, which returns the
  chosen modules, each with its keyword arguments.

Torch's policies work unchanged."""

from __future__ import annotations

import contextlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from torch import nn

from fsdp_compat.errors import NotImplementedStateError, UsageError, truth, unusable

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
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: dict[str, Any]
    ) -> dict[nn.Module, dict[str, Any]]:
        """Return the chosen modules, each with its own copy of the keyword arguments."""


class ModuleWrapPolicy(_Policy):
    """Choose every instance of some classes, with the keyword arguments of the root.

    The policy can also be called like a policy function.

    Args:
        module_classes: the classes of the modules to choose.

    Raises:
        UsageError: ``module_classes`` is not an iterable of classes; also a TypeError."""

    def __init__(self, module_classes: Iterable[type[nn.Module]]) -> None:
        self._module_classes = set(_classes(module_classes, "ModuleWrapPolicy(...)"))

    def _run_policy(
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: dict[str, Any]
    ) -> dict[nn.Module, dict[str, Any]]:
        wanted = tuple(self._module_classes)
        return {
            module: dict(root_kwargs)
            for module in root_module.modules()
            if isinstance(module, wanted) and module not in ignored_modules
        }

    def __call__(self, module: nn.Module, recurse: bool, *args: Any, **kwargs: Any) -> bool:
        """Act as a policy function; further arguments, such as the size, are ignored."""
        return _module_wrap_policy(module, recurse, -1, self._module_classes)

    def __repr__(self) -> str:
        names = ", ".join(sorted(cls.__name__ for cls in self._module_classes))
        return f"{type(self).__name__}({{{names}}})"


class CustomPolicy(_Policy):
    """Choose modules, and their keyword arguments, by calling a function on every module.

    The policy can also be called like a policy function, by callers that pass no keyword arguments
    on; the function must not return a dict then.

    Args:
        lambda_fn: takes a module; False skips the module, True chooses it, and a dict chooses it
            and overrides keyword arguments of the root. An empty dict skips it. Other values count
            by their truth value, but a string is refused.

    Raises:
        UsageError: ``lambda_fn`` is not callable; also a TypeError."""

    def __init__(self, lambda_fn: Callable[[nn.Module], bool | dict[str, Any]]) -> None:
        self._lambda_fn = _function_of_modules(lambda_fn, "CustomPolicy(lambda_fn)")

    def _run_policy(
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: dict[str, Any]
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
        """Act as a policy function; further arguments, such as the size, are ignored."""
        return recurse or bool(
            self._ask(module, "a caller that takes only True or False from a policy", dicts=False)
        )

    def _ask(self, module: nn.Module, where: str, dicts: bool = True) -> bool | dict[str, Any]:
        """Call ``lambda_fn`` on a module. dicts: whether it may return a dict."""
        answer = self._lambda_fn(module)
        if isinstance(answer, dict) and dicts:
            return answer
        if not isinstance(answer, Mapping):
            with contextlib.suppress(UsageError):
                return truth("the return value", answer, where)
        raise unusable(
            "The return value of a CustomPolicy's function",
            "True, False or a dict" if dicts else "True or False",
            answer,
            f"{where}, a {type(module).__name__}",
            "return True or False, or a dict of keyword arguments to override",
        )


def always_wrap_policy(*args: Any, **kwargs: Any) -> bool:
    """Return True: choose every module, whatever ``*args`` and ``**kwargs`` are."""
    return True


def lambda_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, lambda_fn: Callable[[nn.Module], bool]
) -> bool:
    """Choose the modules for which ``lambda_fn`` returns true.

    Bind it with ``functools.partial``; otherwise as ``size_based_auto_wrap_policy``."""
    decide = _function_of_modules(lambda_fn, "lambda_auto_wrap_policy(lambda_fn=...)")
    return recurse or decide(module)


def transformer_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    transformer_layer_cls: set[type[nn.Module]],
) -> bool:
    """Choose the instances of ``transformer_layer_cls``, usually a model's repeated blocks.

    Everything outside the blocks stays with the root, such as an embedding that shares its weight
    with the output. Bind the classes with ``functools.partial``; otherwise as
    ``size_based_auto_wrap_policy``."""
    call = "transformer_auto_wrap_policy(transformer_layer_cls=...)"
    return isinstance(module, _classes(transformer_layer_cls, call)) or recurse


def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    min_num_params: int = int(1e8),
    force_leaf_modules: set[type[nn.Module]] | None = None,
    exclude_wrap_modules: set[type[nn.Module]] | None = None,
) -> bool:
    """Choose a module once enough elements below it belong to no unit yet.

    Args:
        module: the module to decide about.
        recurse: True on the way down, False on the way up.
        nonwrapped_numel: the number of elements at and below the module that no unit holds yet.
        min_num_params: how many elements (not parameters) are enough.
        force_leaf_modules: classes whose instances and their submodules are never chosen. None: the
            attribute ``FORCE_LEAF_MODULES`` of this function, which a program may change.
        exclude_wrap_modules: classes whose instances are never chosen, although their submodules
            can be. None: the attribute ``EXCLUDE_WRAP_MODULES``.

    Returns:
        Whether to look below the module (``recurse=True``), or to choose it."""
    defaults: Any = size_based_auto_wrap_policy
    leaves = defaults.FORCE_LEAF_MODULES if force_leaf_modules is None else force_leaf_modules
    if exclude_wrap_modules is None:
        exclude_wrap_modules = defaults.EXCLUDE_WRAP_MODULES
    leaves = _classes(leaves, "size_based_auto_wrap_policy(force_leaf_modules=...)")
    call = "size_based_auto_wrap_policy(exclude_wrap_modules=...)"
    excluded = _classes(exclude_wrap_modules, call)
    try:
        is_large = nonwrapped_numel >= min_num_params
    except TypeError as error:
        where = "size_based_auto_wrap_policy"
        raise unusable("min_num_params", "a number of elements", min_num_params, where) from error
    return is_large and not isinstance(module, leaves if recurse else excluded)


# Public attributes. A function cannot declare attributes, hence the ignores.
size_based_auto_wrap_policy.FORCE_LEAF_MODULES = {nn.MultiheadAttention}  # type: ignore[attr-defined]
size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES = {nn.ModuleList, nn.ModuleDict}  # type: ignore[attr-defined]


def _module_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    module_classes: Collection[type[nn.Module]],
) -> bool:
    """Choose the instances of ``module_classes``, as ``ModuleWrapPolicy`` does."""
    call = "_module_wrap_policy(module_classes=...)"
    return isinstance(module, _classes(module_classes, call)) or recurse


def _wrap_module_cls_individually(
    module: nn.Module, module_classes: Sequence[type], recurse: bool, *args: Any, **kwargs: Any
) -> bool:
    """``_module_wrap_policy`` with its arguments in another order, as in torch."""
    return _module_wrap_policy(module, recurse, -1, module_classes)


def _or_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, policies: Iterable[Callable[..., bool]]
) -> bool:
    """Choose the modules that any policy function chooses; bind them with ``functools.partial``."""
    return any(
        policy(module=module, recurse=recurse, nonwrapped_numel=nonwrapped_numel)
        for policy in policies
    )


# Wrapper and keyword arguments of the open ``enable_wrap`` block, if any.
_enabled: ContextVar[tuple[Callable[..., nn.Module], dict[str, Any]] | None] = ContextVar(
    "enable_wrap", default=None
)


@contextlib.contextmanager
def enable_wrap(*, wrapper_cls: Any, **wrapper_kwargs: Any) -> Iterator[None]:
    """Let ``wrap`` return ``wrapper_cls(module, **wrapper_kwargs)`` inside the with block.

    A model whose constructor calls ``wrap`` on its large layers is then sharded layer by layer
    while it is built. Built outside the block, it is an ordinary model. Unlike torch's, the block
    applies to its own thread only.

    Args:
        wrapper_cls: a class or function that takes a module and keyword arguments.
        **wrapper_kwargs: keyword arguments for every call of it.

    Raises:
        UsageError: ``wrapper_cls`` is not callable.
        StateError: the block is nested in another one; also a NotImplementedError."""
    if not callable(wrapper_cls):
        raise unusable(
            "wrapper_cls",
            "a class or function that takes a module and keyword arguments",
            wrapper_cls,
            "argument 'wrapper_cls' of enable_wrap",
            "pass wrapper_cls=FullyShardedDataParallel",
        )
    outer = _enabled.get()
    if outer is not None:
        raise NotImplementedStateError.of(
            "enable_wrap blocks cannot be nested.",
            expected="no enable_wrap block around this one",
            got=f"a block with wrapper_cls={outer[0]!r}",
            where=f"enable_wrap(wrapper_cls={wrapper_cls!r})",
            fix="leave the outer block first, or override settings for one module: "
            "wrap(module, name=value)",
        )
    _enabled.set((wrapper_cls, wrapper_kwargs))
    try:
        yield
    finally:
        _enabled.set(None)


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """Return ``module`` wrapped as the surrounding ``enable_wrap`` block says; outside, itself.

    ``**wrap_overrides`` take precedence over the keyword arguments of the block."""
    enabled = _enabled.get()
    if enabled is None:
        return module
    wrapper_cls, kwargs = enabled
    return wrapper_cls(module, **{**kwargs, **wrap_overrides})


def places_of(
    modules: Iterable[nn.Module], root: nn.Module
) -> dict[nn.Module, list[tuple[nn.Module, str]]]:
    """Return for each of ``modules`` where it is registered in ``root``, as (parent, name): several
    places if it is shared, none for the root."""
    places: dict[nn.Module, list[tuple[nn.Module, str]]] = {module: [] for module in modules}
    for path, module in root.named_modules(remove_duplicate=False):
        if module in places and module is not root:
            parent, _, name = path.rpartition(".")
            places[module].append((root.get_submodule(parent), name))
    return places


def _recursive_wrap(
    module: nn.Module,
    auto_wrap_policy: Callable[..., bool],
    wrapper_cls: Callable[..., nn.Module],
    ignored_modules: set[nn.Module],
    ignored_params: set[nn.Parameter],
    only_wrap_children: bool = False,
    **kwargs: Any,
) -> tuple[nn.Module, int]:
    """Wrap the modules that a policy function chooses at and below ``module``, with any wrapper.

    Return ``module`` or its wrapper, and the number of elements in wrapped modules. Modules without
    parameters can be chosen too, since the wrapper need not be one that shards. With
    ``only_wrap_children`` the module itself stays unwrapped. Every call of ``wrapper_cls`` gets
    ``kwargs``. Raises UsageError if ``module`` already contains an instance of it that is not
    ignored."""
    cls = wrapper_cls if isinstance(wrapper_cls, type) else ()
    for name, inner in module.named_modules():
        if isinstance(inner, cls) and inner not in ignored_modules:
            raise UsageError.of(
                f"A module to wrap with {wrapper_cls.__name__} contains one already.",
                expected=f"no instance of {wrapper_cls.__name__} at or below the module",
                got=f"one, in a {type(module).__name__}",
                where=f"submodule {name!r}" if name else "the module itself",
                fix="wrap either by hand or by policy, or put the wrapped module into "
                "ignored_modules",
            )
    units, numel = modules_chosen_by(
        checked_function(auto_wrap_policy),
        module,
        ignored_modules,
        ignored_params,
        may_be_unit=lambda inner: not (only_wrap_children and inner is module),
    )
    places = places_of([inner for inner in children_first(module) if inner in units], module)
    for inner, its_places in places.items():
        unit = wrapper_cls(inner, **kwargs)
        for parent, name in its_places:
            setattr(parent, name, unit)
        if inner is module:
            module = unit
    return module, numel


def modules_chosen_by(
    policy: Callable[..., bool],
    root: nn.Module,
    ignored_modules: Collection[nn.Module],
    ignored_parameters: Collection[nn.Parameter],
    may_be_unit: Callable[[nn.Module], bool],
) -> tuple[set[nn.Module], int]:
    """Return the modules that a policy function chooses at and below ``root``, and how many
    elements they hold.

    Each module is visited once. Its ``nonwrapped_numel`` is its own count minus those of wrapped
    modules below it; a parameter that two children share is subtracted twice, as in torch."""
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


def children_first(root: nn.Module) -> Iterator[nn.Module]:
    """Yield every module at and below ``root`` once, in order of registration, each after its
    submodules."""
    seen = {root}

    def visit(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            if child not in seen:
                seen.add(child)
                yield from visit(child)
        yield module

    yield from visit(root)


# Checks of the arguments and return values of policies.


def _classes(given: Any, call: str) -> tuple[type, ...]:
    """Return ``given`` as a tuple for isinstance. call: the call that passed it, with ``...`` in
    its place."""
    try:
        classes = tuple(given)
        isinstance(None, classes)
    except TypeError as error:
        fix = f"pass {call.replace('...', as_set_of_classes(given))}"
        raise unusable(
            "A policy's choice of modules", "a set of module classes", given, call, fix
        ) from error
    return classes


def as_set_of_classes(given: Any) -> str:
    """Return the source code of the set of classes that was probably meant."""
    items = given if isinstance(given, (set, frozenset, list, tuple)) else [given]
    meant = [item for item in items if isinstance(item, (str, type, nn.Module))]
    names = [
        item if isinstance(item, str) else getattr(item, "__name__", type(item).__name__)
        for item in meant
    ]
    return f"{{{', '.join(names) or 'Block'}}}"


def _function_of_modules(function: Any, where: str) -> Callable[[nn.Module], Any]:
    if callable(function):
        result: Callable[[nn.Module], Any] = function
        return result
    raise unusable("lambda_fn", "a function of one module", function, where)


def checked_function(policy: Callable[..., Any]) -> Callable[..., bool]:
    """Return a policy function that checks its return values. Raises UsageError if it takes other
    arguments.

    As in torch, it may return anything with a truth value, except a string or a dict, which would
    be a mistake."""
    try:
        accept: Callable[..., object] = inspect.signature(policy, follow_wrapped=False).bind
    except (TypeError, ValueError):  # a function without a signature
        accept = dict
    try:
        accept(module=None, recurse=True, nonwrapped_numel=0)
    except TypeError as error:
        expected = "a function (module, recurse, nonwrapped_numel) -> bool, called with these names"
        fix = "use these argument names, and bind any others with functools.partial"
        raise unusable(
            "auto_wrap_policy", expected, policy, f"the call of auto_wrap_policy: {error}", fix
        ) from error

    def checked(**arguments: Any) -> bool:
        answer = policy(**arguments)
        if isinstance(answer, (str, Mapping)):
            where = f"auto_wrap_policy, called for a {type(arguments['module']).__name__}"
            fix = "return True or False; to override keyword arguments, use a CustomPolicy"
            raise unusable("A policy's return value", "True or False", answer, where, fix)
        return bool(answer)

    return checked


def checked_choice(choice: Any, root: nn.Module, where: str) -> dict[nn.Module, Mapping[str, Any]]:
    """Return the choice of a policy object. Raises UsageError for anything but modules of ``root``
    with keyword arguments."""
    if not isinstance(choice, Mapping):
        expected = "a dict from modules to dicts of keyword arguments"
        raise unusable("A policy's return value", expected, choice, where)
    modules = set(root.modules())
    for module, kwargs in choice.items():
        if module not in modules:
            expected = "modules of the wrapped model"
            raise unusable("A policy's choice of modules", expected, module, where)
        what = "A policy's choice of arguments"
        if not isinstance(kwargs, Mapping):
            raise unusable(what, "a dict of keyword arguments", kwargs, where)
        for name in kwargs:
            if not isinstance(name, str):
                raise unusable(what, "names of keyword arguments", name, where)
    return dict(choice)
