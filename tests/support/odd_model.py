"""A small model with everything that is hard for checkpoints, its training, and its state in an
unsharded run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as TorchWrapPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat import ShardedStateDictConfig, ShardingStrategy, StateDictType, fully_shard
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


class OddBlock(Block):
    """Buffers, of which one is not contiguous and one not saved, and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("grid", torch.randn(2, 3).t())
        self.register_buffer("scratch", torch.ones(2), persistent=False)
        self.note = "made"

    def get_extra_state(self) -> dict[str, str]:
        return {"note": self.note}

    def set_extra_state(self, state: dict[str, str]) -> None:
        self.note = state["note"]


class Frozen(nn.Linear):
    """A layer whose parameters are not trained."""

    def __init__(self) -> None:
        super().__init__(5, 5)
        self.requires_grad_(False)


class OddModel(nn.Module):
    """Odd sizes, a tie, a buffer, frozen parameters and one element; with ``odd`` also what torch's
    FSDP refuses: a 0-d and an empty parameter, two dtypes; extra state, and ignored parameters."""

    def __init__(self, odd: bool, block: type[Block] = Block) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.blocks = nn.Sequential(block(), block())
        self.frozen = Frozen()
        self.cube = nn.Parameter(torch.randn(3, 1, 5))
        self.one = nn.Parameter(torch.randn(1))
        self.gain = nn.Parameter(torch.tensor(1.1) if odd else torch.tensor([1.1]))
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.odd = odd
        if odd:
            self.nothing = nn.Parameter(torch.randn(0, 3))
            self.wide = nn.Linear(2, 3, bias=False).double()
            self.ignored = nn.Linear(2, 2)

    def forward(self, tokens: Tensor) -> Tensor:  # [batch] -> [batch, 7]
        self.count += 1
        hidden = self.frozen(self.blocks(self.embed(tokens))) + self.cube.mean(0) + self.one
        logits = self.gain * self.head(hidden)
        if self.odd:
            ones = torch.ones(2)
            logits = logits + self.ignored(ones).sum() + self.nothing.sum()
            logits = logits * self.wide(ones.double()).sum().float()
        return logits


def make_model(seed: int = 0, odd: bool = True, block: type[Block] | None = None) -> OddModel:
    """block: modules with extra state see whole values in all state dicts, ``Block`` does not."""
    torch.manual_seed(seed)
    return OddModel(odd, block or (OddBlock if odd else Block))


def stack(layers: int = 6, bias: bool = False) -> nn.Sequential:
    """Return layers of one size, to be units, so that memory can be counted in units."""
    return nn.Sequential(*(nn.Linear(64, 64, bias=bias) for _ in range(layers)))


def make_optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer with two parameter groups: the first block, and the rest."""
    named = [(name.replace("_fsdp_wrapped_module.", ""), p) for name, p in model.named_parameters()]
    groups: list[dict[str, Any]] = [
        {"params": [p for name, p in named if "blocks.0." in name], "weight_decay": 0.1},
        {"params": [p for name, p in named if "blocks.0." not in name], "lr": 0.03},
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


# -- sharded


def shard(model: Any, config: Config, **options: Any) -> Any:
    """config: the strategy HYBRID_SHARD is given a mesh of two dimensions, MESH is FULL_SHARD on a
    mesh of one: sharded values of both are DTensors. GROUPS is HYBRID_SHARD over process groups,
    ROWS is ``fully_shard``, MIXED has units of both front ends, and parameters beside them."""
    strategy, use_orig_params, policy = config
    ranks = dist.get_world_size()
    ignored = model.ignored if getattr(model, "odd", False) else nn.Identity()
    if strategy == "MIXED":
        model.blocks[1] = FSDP(model.blocks[1], use_orig_params=use_orig_params)
        fully_shard(model.blocks[0])
        fully_shard(model.frozen)
        return model
    if strategy == "ROWS":
        for block in model.blocks:
            fully_shard(block)
        return fully_shard(model, ignored_params={*ignored.parameters()})
    if strategy in ("HYBRID_SHARD", "MESH", "GROUPS"):
        replicas = 2 - ranks % 2
        shape = (ranks,) if strategy == "MESH" else (replicas, ranks // replicas)
        mesh = init_device_mesh("cpu", shape)
        if strategy == "GROUPS":
            options.setdefault("process_group", (mesh.get_group(1), mesh.get_group(0)))
        elif "process_group" not in options:
            options.setdefault("device_mesh", mesh)
        strategy = "FULL_SHARD" if strategy == "MESH" else "HYBRID_SHARD"
    policies: dict[str, Any] = {
        "none": None,
        "blocks": ModuleWrapPolicy({Block, nn.ParameterList}),
        "as torch": ModuleWrapPolicy({Block, Frozen}),
        "always": always_wrap_policy,
    }
    return FSDP(
        model,
        sharding_strategy=ShardingStrategy[strategy],
        use_orig_params=use_orig_params,
        auto_wrap_policy=policies[policy],
        **{"ignored_modules": [ignored], **options},
    )


def sharded_in(layout: str, model: Any, units: Any = ("Residual",), **options: Any) -> Any:
    """Shard any model, whose modules of the classes with these names are units. layout: a key of
    LAYOUTS."""
    if layout in ("flat", "original"):
        options["use_orig_params"] = layout == "original"
        return FSDP(model, auto_wrap_policy={*units}, **options)
    if layout == "columns":
        options["shard_placement_fn"] = lambda p: Shard(p.ndim - 1) if p.ndim > 1 else None
    inner = [m for m in model.modules() if type(m).__name__ in units]
    for module in [*reversed(inner), model]:
        fully_shard(module, **options)
    return model


LAYOUTS: dict[str, Callable[..., Any]] = {
    name: functools.partial(sharded_in, name) for name in ("flat", "original", "rows", "columns")
}

TORCHS = ("plain", "DDP", "FSDP1 flat", "FSDP1 original", "FSDP2")


def torch_model(kind: str, seed: int, odd: bool) -> nn.Module:
    """kind: one of TORCHS."""
    model = make_model(seed, odd)
    if kind == "DDP":
        return DistributedDataParallel(model)
    if kind.startswith("FSDP1"):
        policy, original = TorchWrapPolicy({Block, Frozen}), kind == "FSDP1 original"
        cpu = torch.device("cpu")
        return TorchFSDP(model, auto_wrap_policy=policy, use_orig_params=original, device_id=cpu)
    if kind == "FSDP2":
        for block in model.blocks:
            torch_fully_shard(block)
        return torch_fully_shard(model)
    return model


# -- states


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


def run_of(kind: str, odd: bool = True) -> dict[str, Any]:
    """Return the results of the unsharded run: its state after some steps by name, the loss of the
    next step, and the optimizer's own state dict."""
    model = make_model(odd=odd)
    for number, block in enumerate(model.blocks) if odd else ():
        block.note = f"of block {number}"
    optimizer = make_optimizer(kind, model)
    train(model, optimizer, range(STEPS))
    found = {
        "model": cloned(dict(model.state_dict())),
        "optim": cloned(state_by_name(model, optimizer)),
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


def each_tensor(state: Any, change: Callable[[Tensor], Tensor]) -> Any:
    return tree_map_only(Tensor, change, state)


def cloned(state: Any) -> Any:
    return each_tensor(state, Tensor.clone)


def local_tensors(state: Any) -> list[Tensor]:
    """What this rank holds."""
    found = [leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor)]
    return [
        local
        for leaf in found
        for local in (
            [each.tensor for each in leaf.local_shards()]
            if isinstance(leaf, ShardedTensor)
            else [leaf]
        )
    ]


def by_rank(value: Any) -> list[Any]:
    """Return every rank's value. Collective."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def whole(state: Any) -> Any:
    """Return a state dict with its sharded tensors put together from the boxes of all ranks.
    Collective; one message for all tensors."""
    leaves = tree_leaves(state)
    sharded = list({id(v): v for v in leaves if isinstance(v, ShardedTensor)}.values())
    own = [
        [(each.metadata.shard_offsets, each.tensor.detach().numpy()) for each in v.local_shards()]
        for v in sharded
    ]
    of_ranks, wholes = by_rank(own) if sharded else [], {}
    for number, value in enumerate(sharded):
        out = wholes[id(value)] = torch.full(tuple(value.size()), -1000.0, dtype=value.dtype)
        for offsets, box in (each for boxes in of_ranks for each in boxes[number]):
            if box.size:
                places = tuple(slice(o, o + n) for o, n in zip(offsets, box.shape, strict=True))
                out[places] = torch.as_tensor(box)

    def put(value: Any) -> Any:
        return value.full_tensor() if isinstance(value, DTensor) else wholes.get(id(value), value)

    return tree_map(put, state)


# -- assertions


def assert_same(
    actual: Mapping[Any, Any],
    expected: Mapping[Any, Any],
    where: str = "",
    rtol: float = 0.0,
    atol: float = 0.0,
) -> None:
    """Compare bit by bit without a tolerance; keys in any order. Collective if there are sharded
    values."""
    assert set(actual) == set(expected), f"{where}: {set(actual) ^ set(expected)}"
    actual = whole(actual)
    for name, value in expected.items():
        found, what = actual[name], f"{where} {name}"
        if isinstance(value, Mapping):
            assert_same(found, value, what, rtol, atol)
        elif isinstance(value, Tensor):
            assert isinstance(found, Tensor), what
            assert (found.shape, found.dtype) == (value.shape, value.dtype), what
            if rtol or atol:
                torch.testing.assert_close(found, value, rtol=rtol, atol=atol, msg=what)
            else:
                assert torch.equal(found, value), f"{what}: {found} instead of {value}"
        else:
            assert found == value, what


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
    assert_same(settings_by_name(actual), settings_by_name(expected), where)


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
