"""A small model with everything that is hard for checkpoints, its training, and its state in an
unsharded run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as TorchWrapPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat import ShardedStateDictConfig, ShardingStrategy, StateDictType
from fsdp_compat.wrap import ModuleWrapPolicy, always_wrap_policy

Config = tuple[str, bool, str]  # strategy, use_orig_params, policy

STEPS = 2  # before a checkpoint is written


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 7, bias=False)
        self.norm = nn.BatchNorm1d(7)
        self.down = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.norm(self.up(x))))


class Frozen(nn.Linear):
    """A layer whose parameters are not trained."""

    def __init__(self) -> None:
        super().__init__(5, 5)
        self.requires_grad_(False)


class OddModel(nn.Module):
    """Odd sizes, a tie, buffers, frozen parameters, one element, and (``scalar``) a 0-d parameter,
    which torch's FSDP refuses."""

    def __init__(self, scalar: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.blocks = nn.Sequential(Block(), Block())
        self.frozen = Frozen()
        self.cube = nn.Parameter(torch.randn(3, 1, 5))
        self.one = nn.Parameter(torch.randn(1))
        self.gain = nn.Parameter(torch.tensor(1.1) if scalar else torch.tensor([1.1]))
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: Tensor) -> Tensor:
        self.count += 1
        hidden = self.frozen(self.blocks(self.embed(tokens))) + self.cube.mean(0) + self.one
        return self.gain * self.head(hidden)


def make_model(seed: int = 0, scalar: bool = True) -> OddModel:
    torch.manual_seed(seed)
    return OddModel(scalar)


def stack(layers: int = 6, bias: bool = False) -> nn.Sequential:
    """Return layers of one size, to be units, so that memory can be counted in units."""
    return nn.Sequential(*(nn.Linear(64, 64, bias=bias) for _ in range(layers)))


def make_optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer with two parameter groups: the first block, and the rest."""
    named = [(name.replace("_fsdp_wrapped_module.", ""), p) for name, p in model.named_parameters()]
    first = [p for name, p in named if "blocks.0." in name]
    rest = [p for name, p in named if "blocks.0." not in name]
    groups: list[dict[str, Any]] = [
        {"params": first, "weight_decay": 0.1},
        {"params": rest, "lr": 0.03},
    ]
    if kind == "Adam":
        return torch.optim.Adam(groups, lr=0.02)
    return torch.optim.SGD(groups, lr=0.02, momentum=0.9)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """Train on data that depend only on the step, the same on all ranks; return the losses."""
    losses = []
    for step in steps:
        tokens = torch.randint(7, (8,), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens), tokens.roll(1))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def wrap_as(
    config: Config, model: nn.Module, units: Collection[type[nn.Module]], **options: Any
) -> FSDP:
    """units: of the policy "blocks"."""
    strategy, use_orig_params, policy = config
    policies: dict[str, Any] = {
        "none": None,
        "blocks": ModuleWrapPolicy(units),
        "always": always_wrap_policy,
    }
    return FSDP(
        model,
        sharding_strategy=ShardingStrategy[strategy],
        use_orig_params=use_orig_params,
        auto_wrap_policy=policies[policy],
        **options,
    )


def shard(model: nn.Module, config: Config) -> FSDP:
    """config: the strategy HYBRID_SHARD is given a mesh of two dimensions; MESH is FULL_SHARD on a
    mesh of one. Sharded values of both are DTensors."""
    strategy, ranks = config[0], dist.get_world_size()
    meshes = {"HYBRID_SHARD": (2 - ranks % 2, ranks // (2 - ranks % 2)), "MESH": (ranks,)}
    mesh = init_device_mesh("cpu", meshes[strategy]) if strategy in meshes else None
    config = ("FULL_SHARD" if strategy == "MESH" else strategy, *config[1:])
    return wrap_as(config, model, {Block}, device_mesh=mesh)


def sharded_state(model: nn.Module, **options: Any) -> dict[str, Any]:
    config = ShardedStateDictConfig(**options) if options else None  # None: the default
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, config):
        return model.state_dict()


def state_by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state dict of an unsharded model's optimizer, keyed by names."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    saved = optimizer.state_dict()
    order = [names[p] for group in optimizer.param_groups for p in group["params"]]
    return {
        "state": {order[number]: entry for number, entry in saved["state"].items()},
        "param_groups": [
            {**group, "params": [order[n] for n in group["params"]]}
            for group in saved["param_groups"]
        ],
    }


def run_of(kind: str, scalar: bool = True) -> dict[str, Any]:
    """Return the results of the unsharded run: its state after some steps by name, the loss of the
    next step, and the optimizer's own state dict."""
    model = make_model(scalar=scalar)
    optimizer = make_optimizer(kind, model)
    train(model, optimizer, range(STEPS))
    found = {
        "model": {name: value.clone() for name, value in model.state_dict().items()},
        "optim": cloned(state_by_name(model, optimizer)),
        "by number": cloned(optimizer.state_dict()),
    }
    return {**found, "losses": train(model, optimizer, range(STEPS, STEPS + 2))}


def in_state(
    model: nn.Module, kind: str, run: Mapping[str, Any], options: StateDictOptions | None = None
) -> torch.optim.Optimizer:
    """Put a model into the state of an unsharded run, and return its optimizer in that state."""
    optimizer = make_optimizer(kind, model)
    answer = set_state_dict(
        model,
        optimizer,
        model_state_dict=cloned(run["model"]),
        optim_state_dict=cloned(run["optim"]),
        options=options or StateDictOptions(full_state_dict=True),
    )
    assert not answer.missing_keys and not answer.unexpected_keys
    return optimizer


TORCHS = ("plain", "DDP", "FSDP1 flat", "FSDP1 original", "FSDP2")


def torch_model(kind: str, seed: int, scalar: bool) -> nn.Module:
    """kind: one of TORCHS."""
    model = make_model(seed, scalar)
    if kind == "DDP":
        return DistributedDataParallel(model)
    if kind.startswith("FSDP1"):
        policy, original = TorchWrapPolicy({Block, Frozen}), kind == "FSDP1 original"
        cpu = torch.device("cpu")
        return TorchFSDP(model, auto_wrap_policy=policy, use_orig_params=original, device_id=cpu)
    if kind == "FSDP2":
        for block in model.blocks:
            fully_shard(block)
        return fully_shard(model)
    return model


def each_tensor(state: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(state, Tensor):
        return change(state)
    if isinstance(state, list):
        return [each_tensor(value, change) for value in state]
    return (
        {key: each_tensor(value, change) for key, value in state.items()}
        if isinstance(state, dict)
        else state
    )


def cloned(state: Any) -> Any:
    return each_tensor(state, Tensor.clone)


def local_tensors(state: Any) -> list[Tensor]:
    """What this rank holds."""
    found: list[Tensor] = []

    def add(value: Any) -> Any:
        found.extend(
            [each.tensor for each in value.local_shards()]
            if isinstance(value, ShardedTensor)
            else [value]
        )
        return value

    each_tensor(state, add)
    return found


def sums_of(state: Any) -> list[float]:
    tensors = [
        value.to_local() if isinstance(value, DTensor) else value for value in local_tensors(state)
    ]
    return [tensor.double().sum().item() for tensor in tensors]


def whole(state: Any) -> Any:
    """Return a state dict with its sharded tensors put together from the boxes of all ranks.
    Collective; one message for all tensors."""
    sharded: list[ShardedTensor] = []

    def collect(value: Any) -> None:
        if isinstance(value, ShardedTensor):
            sharded.append(value)
        for inner in value.values() if isinstance(value, Mapping) else ():
            collect(inner)

    collect(state)
    own = [
        [(tuple(s.metadata.shard_offsets), s.tensor.detach().numpy()) for s in value.local_shards()]
        for value in sharded
    ]
    found: list[Any] = [own]
    if sharded:
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, own)
    wholes = {}
    for number, value in enumerate(sharded):
        its = wholes[id(value)] = torch.full(
            tuple(value.metadata().size), -1000.0, dtype=value.dtype
        )
        for offsets, box in (
            (offsets, torch.as_tensor(box)) for boxes in found for offsets, box in boxes[number]
        ):
            if box.numel():
                its[tuple(slice(o, o + s) for o, s in zip(offsets, box.shape, strict=True))] = box

    def put(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: put(inner) for key, inner in value.items()}
        if isinstance(value, DTensor):
            return value.full_tensor()
        return wholes.get(id(value), value)

    return put(state)


def assert_same(actual: Mapping[str, Any], expected: Mapping[str, Any], where: str = "") -> None:
    """Compare bit by bit; keys in any order. Collective if there are sharded values."""
    assert set(actual) == set(expected), f"{where}: {sorted(set(actual) ^ set(expected))}"
    actual = whole(actual)
    for name, value in expected.items():
        found = actual[name]
        if isinstance(value, Mapping):
            assert_same(found, value, f"{where} {name}")
        elif isinstance(value, Tensor):
            assert isinstance(found, Tensor), f"{where} {name}"
            assert (found.shape, found.dtype) == (value.shape, value.dtype), f"{where} {name}"
            assert torch.equal(found, value), f"{where} {name}: {found} instead of {value}"
        else:
            assert found == value, f"{where} {name}"


def assert_identical(actual: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Compare whole values bit by bit; keys in the same order."""
    assert list(actual) == list(expected)
    assert_same(actual, expected)


def assert_holds(model: nn.Module, plain: nn.Module) -> None:
    """The full state dict of ``model`` is that of an unsharded one. Collective."""
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        assert_identical(model.state_dict(), plain.state_dict())


def assert_same_optim(
    actual: Mapping[str, Any], expected: Mapping[str, Any], where: str = ""
) -> None:
    """Compare state by name bit by bit, and the settings of every parameter; groups may be split
    and ordered differently."""
    assert_same(actual["state"], expected["state"], where)
    found, wanted = settings_by_name(actual), settings_by_name(expected)
    assert found.keys() == wanted.keys(), where
    differing = {
        name: set(found[name].items()) ^ set(wanted[name].items())
        for name in wanted
        if found[name] != wanted[name]
    }
    assert not differing, f"{where}: {differing}"


def settings_by_name(state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the settings of each parameter's group; a pair stays a pair even if torch made a list
    of it."""
    return {
        name: {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in group.items()
            if key != "params"
        }
        for group in state["param_groups"]
        for name in group["params"]
    }
