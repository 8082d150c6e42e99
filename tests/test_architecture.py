"""The structure of the package: imports point down, and what can do harm has one owner. Only
sources are read. .ruff.toml has two more rules: who calls collectives, and that torch's FSDP is not
imported."""

from __future__ import annotations

import ast
import functools
import graphlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "fsdp_compat"

# Top to bottom. A module imports from its own layer and from those below it.
LAYERS = (
    ("fsdp_compat", "__main__", "_public"),
    ("_install", "_migrate", "_diagnose", "_plan"),
    ("_fully_shard",),
    ("fully_sharded_data_parallel", "optim", "sharded_grad_scaler"),
    ("checkpoint",),
    ("_front_ends",),
    ("_features",),
    ("_torch_patches",),
    ("_state",),
    ("_archive",),
    ("_stores",),
    ("_engine",),
    ("_comm",),
    ("_layout",),
    ("_torch_private", "wrap"),
    ("api",),
    ("errors", "_progress", "_text", "_version"),
)


def words(text: str) -> set[str]:
    return set(text.split())


# Names in private spelling that belong to nn.Module, or to torch's public interface of FSDP1.
PRIVATE_OF_OTHERS = words(
    "_buffers _modules _parameters _module_classes_to_ignore _world _fqns "
    "_process_group"  # of torch's ShardedTensor
)
HOOK_REGISTRATIONS = words(
    "queue_callback register_backward_hook register_forward_hook register_forward_pre_hook "
    "register_full_backward_hook register_full_backward_pre_hook register_hook "
    "register_module_forward_hook register_module_forward_pre_hook register_multi_grad_hook "
    "register_post_accumulate_grad_hook"
)
STATE_DICT_HOOKS = words(
    "register_load_state_dict_post_hook register_load_state_dict_pre_hook "
    "register_state_dict_post_hook register_state_dict_pre_hook "
    "_register_load_state_dict_pre_hook _register_state_dict_hook"
)
PATCHES = words("Patch PatchOnImport around_functions around_method set_existing swap")
HOOKS_OF_ALL = words(
    "register_module_backward_hook register_module_buffer_registration_hook "
    "register_module_forward_hook register_module_forward_pre_hook "
    "register_module_full_backward_hook register_module_full_backward_pre_hook "
    "register_module_module_registration_hook register_module_parameter_registration_hook "
    "register_optimizer_step_post_hook register_optimizer_step_pre_hook"
)
# Private in spelling only: the project relies on these modules of torch as if they were public.
ALLOWED_PRIVATE_MODULES = (
    "torch.distributed._shard.metadata",
    "torch.distributed._shard.sharded_tensor",
    "torch.distributed._shard.sharding_spec",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
)


@dataclass(frozen=True)
class Source:
    """One file of the package: its path from the root of the package, its dotted name and its
    syntax tree."""

    path: str
    module: str
    tree: ast.Module

    @functools.cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    def at(self, node: ast.AST) -> str:
        return f"{PACKAGE}/{self.path}:{getattr(node, 'lineno', 1)}"

    @functools.cached_property
    def _named(self) -> list[tuple[ast.stmt, str, ast.alias]]:
        """Every alias of an import, with what stands in front of it, relative imports resolved."""
        found: list[tuple[ast.stmt, str, ast.alias]] = []
        for node in self.nodes:
            if isinstance(node, ast.Import):
                found += [(node, "", alias) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                found += [(node, f"{self._origin(node)}.", alias) for alias in node.names]
        return found

    @property
    def imports(self) -> list[tuple[ast.stmt, str]]:
        """Every imported name with its module in front, wherever it is imported."""
        return [(node, f"{origin}{alias.name}") for node, origin, alias in self._named]

    @functools.cached_property
    def bound_names(self) -> dict[str, str]:
        """What each name that an import binds stands for, with its module in front."""
        bound = {}
        for _, origin, alias in self._named:
            if origin or alias.asname:
                bound[alias.asname or alias.name] = f"{origin}{alias.name}"
            else:
                top = alias.name.partition(".")[0]
                bound[top] = top
        return bound

    @functools.cached_property
    def uses(self) -> list[tuple[ast.AST, str]]:
        """Every import, and every attribute chain that starts at an imported name, spelled out in
        full."""
        found: list[tuple[ast.AST, str]] = [*self.imports]
        bound = self.bound_names
        for node in self.nodes:
            names, inner = [], node
            while isinstance(inner, ast.Attribute):
                names.append(inner.attr)
                inner = inner.value
            if names and isinstance(inner, ast.Name) and inner.id in bound:
                found.append((node, ".".join([bound[inner.id], *reversed(names)])))
        return found

    def _origin(self, node: ast.ImportFrom) -> str:
        if node.level == 0:
            return node.module or ""
        package = self.module.split(".")
        up = node.level - self.path.endswith("__init__.py")
        return ".".join([*package[: len(package) - up], *filter(None, [node.module])])


def source(path: str, text: str) -> Source:
    parts = [PACKAGE, *path.removesuffix(".py").split("/")]
    module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    return Source(path, module, ast.parse(text))


@functools.cache
def sources() -> list[Source]:
    folder = ROOT / PACKAGE
    return [
        source(path.relative_to(folder).as_posix(), path.read_text())
        for path in sorted(folder.rglob("*.py"))
    ]


def layer_of(module: str) -> int | None:
    """Return the index in LAYERS of a dotted name of the package, or None for a module that no
    layer names."""
    _, _, inner = module.partition(".")
    first = inner.partition(".")[0] or PACKAGE
    return next((index for index, names in enumerate(LAYERS) if first in names), None)


def upward_imports(source: Source) -> list[str]:
    own, found = layer_of(source.module), []
    for _, name in source.imports:
        # a name that the package itself exports, or a module that no layer knows, is at the top
        if name.partition(".")[0] == PACKAGE and (layer_of(name) or 0) < (own or 0):
            found.append(f"{source.path} -> {name.removeprefix(PACKAGE + '.')}")
    return found


def private_names_of_torch(source: Source) -> list[str]:
    return [
        f"{source.at(node)} uses {name}"
        for node, name in source.uses
        if name.partition(".")[0] == "torch"
        and _is_private(name)
        and not name.startswith(ALLOWED_PRIVATE_MODULES)
    ]


def _is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.endswith("__") for part in name.split("."))


def calls_of(source: Source, names: set[str]) -> list[str]:
    """Return the calls in which the last part of what is called is one of the names."""
    found = []
    for node in source.nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, (ast.Attribute, ast.Name)):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
            if name in names:
                found.append(f"{source.at(node)} calls {name}")
    return found


def uses_of(source: Source, wanted: str) -> list[str]:
    return [f"{source.at(node)} uses {name}" for node, name in source.uses if name == wanted]


def changes_of_torch(source: Source) -> list[str]:
    """Return the patches that are made, the hooks of all modules or optimizers, and assignments to
    attributes of torch's modules and classes."""
    found = calls_of(source, PATCHES)
    names = dict(source.uses)
    for node, name in names.items():
        is_written = isinstance(getattr(node, "ctx", None), (ast.Store, ast.Del))
        if name.rpartition(".")[2] in HOOKS_OF_ALL or (is_written and name.startswith("torch.")):
            found.append(f"{source.at(node)} uses or writes {name}")
    for node in source.nodes:
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr"):
            target = node.args[0]
            name = names.get(target) or source.bound_names.get(ast.unparse(target), "")
            if name.partition(".")[0] == "torch":
                found.append(f"{source.at(node)} writes to {name}")
    return found


def imports_of(source: Source, *prefixes: str) -> list[str]:
    return [
        f"{source.at(node)} imports {name}"
        for node, name in source.imports
        if any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)
    ]


def circle(sources: list[Source]) -> list[str]:
    """Return the files of a circle of imports, if there is one; those for type checking count."""
    known = {source.module: source.path for source in sources}
    below: dict[str, set[str]] = {source.path: set() for source in sources}
    for source in sources:
        for _, name in source.imports:
            target = known.get(name) or known.get(name.rpartition(".")[0])
            if target not in (None, source.path) and not target.endswith("__init__.py"):
                below[source.path].add(target)
    try:
        graphlib.TopologicalSorter(below).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def attributes_of(cls: ast.ClassDef) -> set[str]:
    """The names that a class's methods set on ``self``, and that its body declares."""
    declared = {ast.unparse(node.target) for node in cls.body if isinstance(node, ast.AnnAssign)}
    methods = [node for node in cls.body if isinstance(node, ast.FunctionDef)]
    return declared | {
        node.attr
        for method in methods
        for node in ast.walk(method)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and ast.unparse(node.value) == "self"
    }


def private_reaches(sources: list[Source]) -> list[str]:
    """Return where a private attribute of a class is used outside of the file that defines it."""
    owners: dict[str, set[str]] = {}
    for source in sources:
        for cls in (node for node in source.nodes if isinstance(node, ast.ClassDef)):
            methods = {node.name for node in cls.body if isinstance(node, ast.FunctionDef)}
            for name in attributes_of(cls) | methods:
                if name.startswith("_") and not name.startswith("__"):
                    owners.setdefault(name, set()).add(source.path)
    found = []
    for source in sources:
        modules = source.bound_names
        for node in source.nodes:
            if (
                isinstance(node, ast.Attribute)
                and node.attr not in PRIVATE_OF_OTHERS
                and source.path not in owners.get(node.attr, {source.path})
                and not (
                    isinstance(node.value, ast.Name) and node.value.id in ("self", "cls", *modules)
                )
            ):
                found.append(f"{source.path}: {node.attr}")
    return sorted(set(found))


def report(found: list[str], rule: str) -> None:
    assert not found, "\n".join([rule, *sorted(set(found))])


def test_every_module_of_the_package_has_a_layer() -> None:
    homeless = [source.path for source in sources() if layer_of(source.module) is None]
    report(homeless, "Name the layer of these files in LAYERS:")


def test_imports_form_no_cycle() -> None:
    report(circle(sources()), "Files that import each other, for type checking too:")


def test_no_file_reaches_for_private_attributes_of_another_files_classes() -> None:
    report(private_reaches(sources()), "Give it a public name, or move the code:")


@dataclass(frozen=True)
class Rule:
    """What no file of these folders does, except for its owners."""

    finds: Callable[[Source], list[str]]
    advice: str
    owners: tuple[str, ...] = ()
    folders: tuple[str, ...] = ("",)


END_OF_BACKWARD = f"{PACKAGE}._torch_private.on_end_of_backward"  # for hooks.py
ABOVE_STATE = ("_front_ends", "fully_sharded_data_parallel", "sharded_grad_scaler", "_stores")
RULES = {
    "imports point down": Rule(
        upward_imports, "A module imports only from its own layer and from those below it:"
    ),
    "state and checkpoints know no store and no front end": Rule(
        lambda source: imports_of(source, *(f"{PACKAGE}.{name}" for name in ABOVE_STATE)),
        "They work on registered units and on _engine/state_store.py's StateStore:",
        folders=("_state/", "checkpoint/"),
    ),
    "the layout is pure arithmetic without torch": Rule(
        lambda source: imports_of(source, "torch"),
        "_layout is integers and shapes; what needs more belongs to a layer above:",
        folders=("_layout/",),
    ),
    "only storage.py frees and allocates storages": Rule(
        lambda source: calls_of(source, {"resize_"}),
        "Call a function of _engine/storage.py instead:",
        owners=("_engine/storage.py",),
    ),
    "only hooks.py registers hooks": Rule(
        lambda source: calls_of(source, HOOK_REGISTRATIONS) + uses_of(source, END_OF_BACKWARD),
        "Call a function of _engine/hooks.py instead:",
        owners=("_engine/hooks.py", "_torch_private/__init__.py"),
    ),
    "only their owners register state-dict hooks": Rule(
        lambda source: calls_of(source, STATE_DICT_HOOKS),
        "State-dict hooks are registered by their owners:",
        owners=("_engine/hooks.py", "_state/model_loading.py"),
    ),
    "torch is changed in one place, and by install()": Rule(
        changes_of_torch,
        "Move the patch into a module of _torch_patches, and list it at the head of that package:",
        owners=(
            *("_torch_patches/", "_torch_private/", "_install/"),
            *("_plan/memory.py", "_plan/simulation.py"),
        ),
    ),
    "only the adapters use private names of torch": Rule(
        private_names_of_torch,
        "Give the private name a public one in _torch_private, with the reason beside it:",
        owners=("_torch_private/",),
    ),
}


@pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))
def test_rule(rule: Rule) -> None:
    checked = [source for source in sources() if source.path.startswith(rule.folders)]
    others = [source for source in checked if not source.path.startswith(rule.owners)]
    assert checked and len(checked) - len(others) >= len(rule.owners), "a folder or owner is gone"
    report([line for source in others for line in rule.finds(source)], rule.advice)


def test_every_path_in_the_map_exists() -> None:
    text = (ROOT / PACKAGE / "ARCHITECTURE.md").read_text()
    paths = set(re.findall(r"`([\w/]+(?:\.py|/))", text))
    assert len(paths) > 20
    missing = [p for p in paths if not (ROOT / PACKAGE / p).exists() and not (ROOT / p).exists()]
    report(missing, "Mend the map, fsdp_compat/ARCHITECTURE.md:")
