"""Every private name of torch that the package uses, with the reason beside it; without one, torch
has no public name for it."""

from __future__ import annotations

import contextlib
import datetime
import functools
import importlib
import itertools
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import AllgatherOptions, PrefixStore, ReduceScatterOptions
from torch._C._distributed_c10d import Store as Store
from torch._C._dynamo import eval_frame
from torch._functorch import pyfunctorch
from torch.autograd import forward_ad
from torch.distributed.constants import default_pg_timeout
from torch.utils import _python_dispatch, checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

_T = TypeVar("_T", bound=torch.Tensor)

if TYPE_CHECKING:

    class IncompatibleKeys(NamedTuple):
        missing_keys: list[str]
        unexpected_keys: list[str]

else:  # what load_state_dict returns: torch's class has no types, and no public name
    IncompatibleKeys = nn.modules.module._IncompatibleKeys

# graph_task(): the number of the graph task, -1 outside backward. No public name distinguishes a
# recomputation from a forward. This is the C function, because every forward calls it twice.
graph_task: Callable[[], int] = torch._C._current_graph_task_id


def in_graph_task() -> bool:
    """True inside backward."""
    return graph_task() != -1


def nodes_before(nodes: Sequence[Any]) -> list[Any]:
    """Return the nodes that run right after ``nodes`` in backward, except parameters' nodes and
    those that may lead back to ``nodes``: only nodes older than all of them."""
    first = min(map(age_of, nodes))
    edges = itertools.chain.from_iterable(map(_edges, nodes))
    return [node for node, _ in edges if node is not None and age_of(node) < first]


_edges = operator.attrgetter("next_functions")
# age_of(node): higher for later nodes of a thread, highest for those of parameters; next_age(): of
# the next node.
age_of: Callable[[Any], int] = operator.methodcaller("_sequence_nr")
next_age: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]


def runs_now(node: Any) -> bool:
    """Inside backward: True if a node that is not a leaf is part of the running graph."""
    return torch._C._will_engine_execute_node(node)


def on_end_of_backward(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the running graph task has ended. The engine's queue is not public."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


# is_profiling(): True while a profiler runs. There is no public name, and recording events that
# nobody reads costs ten times as much as asking.
is_profiling: Callable[[], bool] = torch._C._autograd._profiler_enabled


def profiled(what: str, label: str) -> contextlib.AbstractContextManager[object]:
    """A context that profilers show as what is done for a unit."""
    if not is_profiling():
        return _UNSEEN
    return torch.profiler.record_function(f"FSDP::{what} ({label})")


_UNSEEN = contextlib.nullcontext()


# set_compiler(compiler): let ``compiler`` evaluate frames from now on (None: no compilation), and
# return the previous one. ``torch.compiler.disable`` does the same around a call, but imports the
# compiler, which takes seconds. This is the C function, because a wrapper would be compiled.
set_compiler: Callable[[Any], Any] = eval_frame.set_eval_frame


def never_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keep torch.compile from tracing or compiling a function; what it calls may be compiled."""
    action = eval_frame._FrameAction
    skip = eval_frame._FrameExecStrategy(action.SKIP, action.DEFAULT)
    eval_frame.set_code_exec_strategy(function.__code__, skip)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # for calls from code that is traced
    return function


def has_optimizers_in_backward() -> bool:
    """True if ``_apply_optimizer_in_backward`` was called for a live parameter."""
    module = sys.modules.get("torch.distributed.optim.apply_optimizer_in_backward")
    return module is not None and len(module.param_to_acc_grad_map) > 0


def optimizers_in_backward(parameter: nn.Parameter) -> Sequence[torch.optim.Optimizer]:
    """Return what steps a parameter in backward. The public function needs a module."""
    result: Sequence[torch.optim.Optimizer] = parameter.__dict__.get("_in_backward_optimizers", ())
    return result


_post_accumulate_hooks = operator.attrgetter("_post_accumulate_grad_hooks")


def have_post_accumulate_hooks(params: Iterable[torch.Tensor]) -> bool:
    return any(map(_post_accumulate_hooks, params))


def run_post_accumulate_hooks(params: Sequence[torch.Tensor]) -> None:
    """Run post-accumulate hooks: autograd, which accumulates elsewhere, does not."""
    for param in params:
        hooks: Any = _post_accumulate_hooks(param)
        for hook in tuple(hooks.values()) if hooks else ():
            hook(param)


# The attribute of a tensor with its ``register_hook`` hooks, or None. By it hooks get to another
# tensor, and their handles still remove them; nothing public moves hooks.
GRADIENT_HOOKS = "_backward_hooks"
_gradient_hooks = operator.attrgetter(GRADIENT_HOOKS)


def have_gradient_hooks(params: Sequence[torch.Tensor]) -> bool:
    return any(map(_gradient_hooks, params))


def after_gradient_hooks(param: torch.Tensor, grad: torch.Tensor | None) -> torch.Tensor | None:
    """Return what a parameter's hooks make of its gradient."""
    for hook in tuple((_gradient_hooks(param) or {}).values()) if grad is not None else ():
        changed = hook(grad)
        grad = grad if changed is None else changed
    return grad


def is_plain(tensor: torch.Tensor) -> bool:
    """True for a tensor with its own storage; False for a DTensor, which wraps others."""
    return type(tensor) in (torch.Tensor, nn.Parameter) or not isinstance(tensor, dtensor_class())


def is_dtensor(value: object) -> bool:
    return isinstance(value, dtensor_class())


def dtensor_class() -> Any:
    """Return DTensor if it was imported, which takes a second; before, no tensor is one."""
    module = sys.modules.get("torch.distributed.tensor")
    return () if module is None else module.DTensor


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor in this process, without a graph."""
    return tensor if is_plain(tensor) else tensor._local_tensor  # type: ignore[attr-defined]


def placement(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return () for a plain tensor; for a DTensor its mesh, and which dims are replicated."""
    if is_plain(tensor):
        return ()
    return tensor.device_mesh, tuple(p.is_replicate() for p in tensor.placements)  # type: ignore[attr-defined]


def copy_together(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy many tensors, casts included. A loop of ``copy_`` costs six times as much."""
    torch._foreach_copy_(targets, sources)


def add_together(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Add many tensors in place, by one kernel of a device."""
    torch._foreach_add_(targets, sources)


def zero_together(tensors: list[torch.Tensor]) -> None:
    """Set many tensors to zero, by one kernel of a device if they are dense."""
    if tensors:  # none is an error
        torch._foreach_zero_(tensors)


def split_together(rows: torch.Tensor, sizes: list[int], targets: list[torch.Tensor]) -> None:
    """Split the columns of ``rows`` by ``sizes`` and copy them into tensors, by one kernel."""
    torch.split_with_sizes_copy(rows, sizes, dim=1, out=targets)


def norms_together(
    tensors: list[torch.Tensor], order: float, dtype: torch.dtype
) -> Sequence[torch.Tensor]:
    """Return the norm of each tensor, 0-d, computed in ``dtype``, in one call."""
    if dtype.is_complex:  # not supported by the call below
        return [torch.linalg.vector_norm(tensor, order, dtype=dtype) for tensor in tensors]
    return torch._foreach_norm(tensors, order, dtype=dtype)


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor of which another is a view, or None if it is not a view."""
    return tensor._base


def scale_together(tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply many tensors in place by one scalar tensor, in one call."""
    torch._foreach_mul_(tensors, factor)


def storage_key(tensor: torch.Tensor) -> int:
    """Return the identity of a tensor's storage object, whose data pointer is null while freed; 0
    for one without, such as a sparse tensor."""
    if type(tensor) is not torch.Tensor:
        tensor = local_part(tensor)
    while _is_wrapped(tensor):  # of torch.func: there is no public way to the tensor inside
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else 0


_is_wrapped: Callable[[torch.Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
_transform: Callable[[], object] = torch._C._functorch.peek_interpreter_stack  # None: none runs


def layers_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return a tensor and, in transforms of torch.func and forward-mode derivatives, those that
    hold its values and derivatives: each may be in a graph."""
    layers, has_duals = [tensor], forward_ad._current_level >= 0
    for layer in layers if has_duals or _transform() is not None else ():
        tangent = forward_ad.unpack_dual(layer).tangent if has_duals else None
        inside = torch._C._functorch.get_unwrapped(layer) if _is_wrapped(layer) else None
        layers += [each for each in (tangent, inside) if each is not None]
    return layers


def outside_transforms(function: Callable[..., None]) -> Callable[..., None]:
    """Let a function set aside the transforms of torch.func that run."""

    def run(*args: Any) -> None:
        if _transform() is None:
            return function(*args)
        with pyfunctorch.temporarily_clear_interpreter_stack():
            return function(*args)

    return run


def num_holders(storage: torch.UntypedStorage) -> int:
    """Return how many tensors, and other objects, hold a storage. There is no public way."""
    return int(torch._C._storage_Use_Count(storage._cdata))


def same_storage(one: torch.Tensor, other: torch.Tensor) -> bool:
    return storage_key(one) == storage_key(other)


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return a module's own parameters: a swap by ``setattr`` costs ten times as much."""
    return module._parameters


class PoisonedMemory(TorchDispatchMode):
    """A context that fills new uninitialised tensors with NaN, or the largest integer. torch's
    ``fill_uninitialized_memory`` works in deterministic mode only, which changes more."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if (
            func.overloadpacket in _EMPTY
            and isinstance(result, torch.Tensor)
            and not result.is_meta
        ):
            if result.is_floating_point() or result.is_complex():
                result.fill_(float("nan"))
            elif result.dtype != torch.bool:
                result.fill_(torch.iinfo(result.dtype).max)
        return result


_EMPTY = (
    torch.ops.aten.empty,
    torch.ops.aten.empty_like,
    torch.ops.aten.empty_strided,
    torch.ops.aten.new_empty,
)


def children_of(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return a module's children under all their names; ``named_children`` omits second names."""
    return [(name, child) for name, child in module._modules.items() if child is not None]


def refresh_rnn_weights(module: nn.RNNBase) -> None:
    """Rebuild the list of weights that RNN modules keep beside their parameters."""
    parameters = module._parameters
    module._flat_weights = [parameters.get(name) for name in module._flat_weights_names]


def group_named(name: str) -> dist.ProcessGroup | None:
    """Return the process group with a name, which is the same on all ranks and can be pickled."""
    names = dist.distributed_c10d._world.pg_names
    return next((group for group, its in names.items() if its == name), None)


def group_timeout(group: dist.ProcessGroup) -> datetime.timedelta:
    """Return the time limit of a process group. Point-to-point waits need it as an argument."""
    for device in ("cpu", "cuda"):
        try:
            return group._get_backend(torch.device(device)).options._timeout
        except (AttributeError, RuntimeError):
            continue
    return default_pg_timeout


_ASYNC_GATHER: Any = AllgatherOptions()
_ASYNC_GATHER.asyncOp = True
_ASYNC_SUM: Any = ReduceScatterOptions()
_ASYNC_SUM.asyncOp = True
_ASYNC_SUM.reduceOp = dist.ReduceOp.SUM


def start_all_gather(group: dist.ProcessGroup, full: torch.Tensor, own: torch.Tensor) -> dist.Work:
    """Start an all-gather. The public function costs more host time than the call itself."""
    if full.dtype.is_complex:  # backends do not support complex numbers
        full, own = torch.view_as_real(full), torch.view_as_real(own)
    if not counts_collectives():  # a context costs more host time than this check
        return group._allgather_base(full, own, _ASYNC_GATHER)
    with uncounted():
        return group._allgather_base(full, own, _ASYNC_GATHER)


def start_all_gathers(
    group: dist.ProcessGroup, fulls: list[torch.Tensor], owns: list[torch.Tensor]
) -> dist.Work:
    """Start several all-gathers as one collective. torch's only other way is a private context."""
    real = [[torch.view_as_real(t) if t.is_complex() else t for t in ts] for ts in (fulls, owns)]
    with uncounted():
        return group.allgather_into_tensor_coalesced(real[0], real[1], _ASYNC_GATHER)


def start_reduce_scatter(
    group: dist.ProcessGroup, total: torch.Tensor, buffer: torch.Tensor
) -> dist.Work:
    """Start a summing reduce-scatter, see ``start_all_gather``."""
    if total.dtype.is_complex:
        total, buffer = torch.view_as_real(total), torch.view_as_real(buffer)
    if not counts_collectives():
        return group._reduce_scatter_base(total, buffer, _ASYNC_SUM)
    with uncounted():
        return group._reduce_scatter_base(total, buffer, _ASYNC_SUM)


def is_gloo(group: dist.ProcessGroup, device: torch.device) -> bool:
    """True if a group, which may have several backends, uses gloo for tensors of a device."""
    try:
        return group._get_backend(device).name() == "gloo"
    except (RuntimeError, AttributeError):
        return False


def default_store() -> Store | None:
    """Return the store of the default process group, or None without one."""
    return dist.distributed_c10d._get_default_store() if dist.is_initialized() else None


def second_connection(store: Store) -> Store:
    """Return another connection to a store, for another thread: a wait blocks its connection."""
    try:
        found: Store = store.clone()  # type: ignore[attr-defined]
    except RuntimeError:  # a user-defined store
        return store
    return found


def is_registered(group: dist.ProcessGroup) -> bool:
    """True until a process group is destroyed. The public functions raise instead of answering."""
    return group in dist.distributed_c10d._world.pg_map


def default_device_of_backend(group: dist.ProcessGroup) -> torch.device:
    """Return the device type that a process group supports, the CPU if it supports several."""
    types = [device.type for device in group._device_types]
    return torch.device("cpu" if "cpu" in types or not types else types[0])


def tensor_without_storage(
    cls: type[_T], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> _T:
    """Make an instance of a tensor subclass that is larger than this process's part."""
    return torch.Tensor._make_wrapper_subclass(
        cls, shape, dtype=dtype, device=device, layout=torch.strided
    )


def as_plain_tensor(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a method of torch.Tensor on a subclass as on a plain tensor."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


# Of torch.distributed.checkpoint.state_dict: the names of a parameter in state dicts. It refuses
# names without the part that torch.compile adds.
NAMES_FUNCTION = "_get_fqns"

# For subclasses of torch.Tensor whose results are plain tensors; its name is documented, not
# public.
no_torch_function: Any = torch._C._disabled_torch_function_impl


def replicate_module() -> type:
    """Return the class that pipelining checks for besides FSDPModule; importing it loads FSDP."""
    from torch.distributed._composable.replicate_with_fsdp import ReplicateModule

    return ReplicateModule


def load_collectives() -> None:
    """Import the attribute of torch.distributed that its ``utils`` rely on, as FSDP does."""
    importlib.import_module("torch.distributed._functional_collectives")


def composable_apis(module: nn.Module) -> frozenset[str]:
    """Return the names of composable functions, such as ``replicate``, applied to a module."""
    contract = sys.modules.get("torch.distributed._composable.contract")
    if contract is None:
        return frozenset()
    return frozenset(module.__dict__.get(contract.REGISTRY_KEY, ()))


def note_composable(module: nn.Module, name: str) -> None:
    """Record that a composable function was applied, so that ``replicate`` skips the module."""
    contract = importlib.import_module("torch.distributed._composable.contract")
    registry = module.__dict__.setdefault(contract.REGISTRY_KEY, {})
    registry[name] = contract.RegistryItem()


# Nonzero if a dispatch mode is active, such as one that counts collectives or records operators.
counts_collectives: Callable[[], int] = torch._C._len_torch_dispatch_stack


def count_collective(name: str) -> None:
    """Let CommDebugMode, which only sees operators, count a collective of the engine."""
    for mode in _counting_modes():
        mode.__torch_dispatch__(_Counted(name), ())


def uncounted() -> contextlib.AbstractContextManager[object]:
    """A context for operators that CommDebugMode must not count, or has already counted."""
    if counts_collectives() and _counting_modes():
        return _python_dispatch._disable_current_modes()
    return _NO_CONTEXT


_NO_CONTEXT = contextlib.nullcontext()


def _counting_modes() -> list[Any]:
    from torch.distributed.tensor.debug import CommDebugMode

    modes = _python_dispatch._get_current_dispatch_mode_stack()
    return [mode for mode in modes if isinstance(mode, CommDebugMode)]


def unrecorded() -> contextlib.AbstractContextManager[object]:
    """A context for operators that no transform of torch.func may see, nor selective activation
    checkpointing record: it numbers calls, and a recomputation that finds parameters unsharded
    makes different ones."""
    if _transform() is not None:
        return pyfunctorch.temporarily_clear_interpreter_stack()
    if counts_collectives():
        modes = _python_dispatch._get_current_dispatch_mode_stack()
        others = [mode for mode in modes if not isinstance(mode, _RECORDERS)]
        if len(others) < len(modes):
            return _exchange_modes(modes, others)
    return _NO_CONTEXT


_RECORDERS = checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode


@contextlib.contextmanager
def _exchange_modes(modes: list[Any], others: list[Any]) -> Iterator[None]:
    """A context in which ``others`` replace ``modes``; entering one resets CommDebugMode."""
    _replace_modes(modes, others)
    try:
        yield
    finally:
        _replace_modes(others, modes)


def _replace_modes(old: list[Any], new: list[Any]) -> None:
    for _ in old:
        _python_dispatch._pop_mode()
    for mode in new:
        _python_dispatch._push_mode(mode)


class _Counted:
    """An operator that does nothing."""

    def __init__(self, name: str) -> None:
        self._overloadpacket = getattr(torch.ops.c10d, name)

    def __call__(self) -> None:
        pass

    def __str__(self) -> str:
        return f"{self._overloadpacket}.default"


def unpatched(owner: nn.Module | torch.optim.Optimizer, method: str) -> Callable[..., Any]:
    """Return the original of a method that torch.distributed.checkpoint may have patched."""
    found = getattr(owner, method)
    module = sys.modules.get("torch.distributed.checkpoint.state_dict")
    patched = getattr(module, "_patched_state_dict", ())
    return functools.partial(getattr(type(owner), method), owner) if found in patched else found


def under_prefix(store: Store, prefix: str) -> Store:
    """Return a view of a store that adds a prefix to keys, on the same connection."""
    return PrefixStore(prefix, store)


def offsets_on_mesh(
    shape: tuple[int, ...], mesh: Any, placements: tuple[Any, ...]
) -> tuple[int, ...]:
    """Return the offsets of this process's part of a DTensor. There is no public name."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return tuple(compute_local_shape_and_global_offset(torch.Size(shape), mesh, placements)[1])


def chunk_together(tensors: list[torch.Tensor], chunks: int, out: torch.Tensor) -> None:
    """Cut every tensor along dim 0 into ``chunks`` parts, zero-padded to equal size, and write part
    i of all tensors to ``out[i]``, casts included. Slicing and copying costs twice as much."""
    torch._chunk_cat(tensors, 0, chunks, out=out)


def keeping_versions(tensors: Sequence[torch.Tensor]) -> contextlib.AbstractContextManager[None]:
    """A context in which writes to ``tensors`` do not bump their version counters."""
    return torch.autograd._unsafe_preserve_version_counter(tuple(tensors))  # type: ignore[attr-defined]


def place_in_file(name: str, start: int, nbytes: int) -> Any:
    """Return a value's location as metadata hold it; each of torch's writers has its class."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(name, start, nbytes)


def step_without_hooks(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """Return the ``step`` of an optimizer's class, without the global hooks that torch has put
    around it, which would see trials on small parameters as steps."""
    step: Any = type(optimizer).step
    result: Callable[..., Any] = step.__wrapped__ if getattr(step, "hooked", False) else step
    return result


# Gathers a ShardedTensor for torch.distributed's state dict helpers, from its first shard alone.
GATHERS_FIRST_SHARD = ("torch.distributed._state_dict_utils", "_all_gather_sharded_tensor")
