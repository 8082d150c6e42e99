"""Loading: every rank works out from the manifest which bytes it needs, reads these alone, and
changes nothing until all ranks have found that their files are there and make sense, that the
checksums hold, and that every value can be made.

Files are read twice: once to check them, and once to where the values go, which is then out of the
system's memory. To keep what was read the first time would take as much memory again, and more
time: to be given fresh memory takes longer than to read. The second time the checksum of each block
is compared again before anything is copied out of it, so nothing is loaded but what was saved. If
the files change between the two readings, the load ends with an error, which says that a part was
loaded before."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import errors
from .._comm.host_memory import memory_of
from .._engine.state_store import store_of
from .._layout.transfer import runs_of_part, same_parts
from .._state.model_units import units_of
from .._state.optimizers import convert
from .._state.unmanaged import load_unmanaged, unmanaged_state
from ..errors import CheckpointError, FsdpCompatError, explain
from ._blocks import (
    BLOCK_NBYTES,
    Facts,
    Wanted,
    changed_meanwhile,
    check,
    damaged,
    merged,
    nbytes_to_check,
    read_checked,
)
from ._head import Head, parse_head
from ._header import dtype_of, is_known, length_of_header, parse_header
from ._manifest import FlatGroup, file_name, read_manifest
from ._optimizers import SharedOptimizer
from ._progress import progress_bar, require_bar
from ._ranks import Ranks, all_ranks_or_raise, as_ours, ranks_of, require_rest
from ._snapshot import (
    NamedGroup,
    held_by,
    named_groups,
    warn_of_left_out,
)
from ._texts import brief, listed, parse_json, sizes
from ._values import decode

__all__ = ["load"]


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    progress: bool = False,
) -> Any:
    """Load the checkpoint in directory ``path`` into the model and the optimizer; return the
    ``extra`` it was saved with.

    Collective: all ranks. The number of ranks, the wrapping, the strategy, ``use_orig_params`` and
    the dtypes may be others than those it was saved with. With as many ranks as saved it, each gets
    its own ``extra`` back, otherwise that of the first one.

    Args:
        path: what ``save`` returned, or ``latest(folder)``.
        model: with FullyShardedDataParallel in it, and the parameter names of the one that was
            saved.
        optimizer: of its parameters; its state is replaced. None: what was saved of one is left.
        progress: show bytes and rate on the first rank; needs tqdm.

    Raises:
        UsageError: an argument cannot work.
        CheckpointError: the checkpoint is another model's, or a file of it is missing, truncated,
            changed or another checkpoint's; on all ranks, before anything has changed. If a file
            changes or cannot be read any more after it was checked, or the model or the optimizer
            refuses a value, the error says that the model and the optimizer may be partly changed.
    """
    call = "checkpoint.load"
    instances, ranks = ranks_of(model, call)
    with ranks.taking_part():
        problem: BaseException | None = None
        plan, shared = None, None
        try:
            if not isinstance(path, (str, os.PathLike)):
                raise errors.wrong_type("path", "a path", path, call)
            if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
                raise errors.wrong_type(
                    "optimizer", "a torch.optim.Optimizer, or None", optimizer, call
                )
            errors.require_bools(call, progress=progress)
            require_bar(progress, f"{call}(..., progress=True)")
            require_rest(instances, call)
            if optimizer is not None:
                convert(optimizer)
            shared = SharedOptimizer(model, optimizer, ranks)
            plan = _Plan(Path(path), model, optimizer, ranks)
            plan.source.check(progress and ranks.number == 0)
        except Exception as error:
            problem = as_ours(
                error, "The checkpoint could not be read.", path, "nothing was loaded"
            )
        own = (
            None
            if plan is None or shared is None
            else (plan.source.manifest.identity, shared.told())
        )
        told = all_ranks_or_raise(ranks, problem, own, call)
        assert plan is not None
        assert shared is not None
        shared.require_alike([of_optimizer for _, of_optimizer in told], call)
        identities = {identity for identity, _ in told}
        if len(identities) > 1:
            raise CheckpointError(
                explain(
                    "Ranks load different checkpoints.",
                    expected="one checkpoint on all ranks",
                    got=f"{len(identities)} of them; this rank: {path}",
                    where=call,
                    fix="pass one path on all ranks; call latest(folder) when no save is under way",
                )
            )
        extra = None
        try:
            extra = plan.commit(progress and ranks.number == 0)
        except FsdpCompatError as error:
            problem = error
        except OSError as error:
            problem = as_ours(
                error,
                "The checkpoint could not be read.",
                path,
                "a part was loaded before: load again",
            )
        except Exception as error:
            problem = _not_taken(error, path)
        all_ranks_or_raise(ranks, problem, None, call)
        return extra


def _not_taken(error: Exception, path: object) -> CheckpointError:
    made = CheckpointError(
        explain(
            "The model or the optimizer does not take what the checkpoint holds.",
            expected="values that load_state_dict of both takes",
            got=brief(error),
            where=str(path),
            fix="the model and its optimizer may be partly changed: load another checkpoint before "
            "you go on",
        )
    )
    made.__cause__ = error
    return made


class _Source:
    """A checkpoint's files: what is wanted of them, and what they say of themselves."""

    def __init__(self, path: Path) -> None:
        self.path, self.manifest = path, read_manifest(path)
        self.located = dict(self.manifest.located())
        self._heads: dict[int, Head] = {}
        self._wanted: dict[int, list[Wanted]] = {}
        self._whole: set[tuple[int, str]] = (
            set()
        )  # (file, entry) that is wanted as a tensor of its own

    def head(self, number: int) -> Head:
        """Return a file's head: read at once, and checked before anybody looks at what it says."""
        if number not in self._heads:
            path, facts = self.path / file_name(number), self._facts(number)
            first = self._checked(number, 0, min(BLOCK_NBYTES, facts.nbytes))
            stop = 8 + length_of_header(first[:8], facts.nbytes, path)
            text = first[8:stop] + (
                self._checked(number, len(first), stop - len(first)) if stop > len(first) else b""
            )
            try:
                head = parse_head(*parse_header(text, facts.nbytes, path))
            except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
                raise damaged(path, "what a rank has written", brief(error)) from error
            if (head.identity, head.number) != (self.manifest.identity, number):
                got = f"file {head.number} of save {head.identity[:40]}"
                raise damaged(path, f"file {number} of save {self.manifest.identity[:40]}", got)
            self._heads[number] = head
        return self._heads[number]

    def _checked(self, number: int, start: int, nbytes: int) -> bytes:
        found = torch.empty(nbytes, dtype=torch.uint8)
        read_checked(
            self.path / file_name(number), self._facts(number), [Wanted(start, found)], _nothing
        )
        return bytes(memory_of(found))

    def want(
        self, number: int, name: str, dtype: torch.dtype, start: int, target: torch.Tensor
    ) -> None:
        """Ask for elements of an entry, of ``dtype``, from ``start`` on, as many as ``target``
        (1-D) has."""
        entry = self.head(number).entries.get(name)
        size = dtype.itemsize
        described_as = dtype if is_known(dtype) else torch.uint8
        if (
            entry is None
            or entry.dtype != described_as
            or (start + target.numel()) * size > entry.nbytes
        ):
            raise damaged(
                self.path / file_name(number),
                f"{start + target.numel()} elements of {dtype} under {name!r}",
                "no such entry" if entry is None else f"{entry.nbytes} bytes of {entry.dtype}",
            )
        self._wanted.setdefault(number, []).append(
            Wanted(entry.start + start * size, target, dtype)
        )

    def want_tensor(self, number: int, name: str) -> torch.Tensor:
        """Ask for a whole tensor; return where it will be."""
        entry = self.head(number).entries.get(name)
        if (
            entry is None or (number, name) in self._whole
        ):  # a save gives each tensor a name of its own
            got = "none of that name" if entry is None else "one that was read before"
            raise damaged(self.path / file_name(number), f"an entry {name!r}", got)
        self._whole.add((number, name))
        target = torch.empty(entry.shape, dtype=entry.dtype)
        self.want(number, name, entry.dtype, 0, target.view(-1))
        return target

    def _facts(self, number: int) -> Facts:
        return self.manifest.files[number]

    def left_out(self) -> list[str]:
        """What the files that were read say is missing from them."""
        return sorted({name for head in self._heads.values() for name in head.left_out})

    def check(self, shown: bool) -> None:
        """Check all blocks that hold what is wanted."""
        total = sum(
            nbytes_to_check(self._facts(number), wanted) for number, wanted in self._wanted.items()
        )
        with progress_bar(shown, f"check step {self.manifest.step}", total) as tick:
            for number, wanted in sorted(self._wanted.items()):
                check(self.path / file_name(number), self._facts(number), wanted, tick)

    def read(self, shown: bool) -> None:
        """Read all that is wanted to where it goes. Raises CheckpointError if it is not any more
        what ``check`` has seen."""
        total = sum(one.nbytes for wanted in self._wanted.values() for one in wanted)
        with progress_bar(shown, f"load step {self.manifest.step}", total) as tick:
            for number, wanted in sorted(self._wanted.items()):
                try:
                    read_checked(
                        self.path / file_name(number), self._facts(number), merged(wanted), tick
                    )
                except CheckpointError as error:
                    raise changed_meanwhile(error, self.path) from error
        self._wanted.clear()


@dataclasses.dataclass(frozen=True)
class _Part:
    """Where the elements of one parameter, that this rank needs, are in the checkpoint."""

    group: FlatGroup
    index: int
    runs: tuple[
        tuple[int, int, int, int], ...
    ]  # (file, start in the entry, start in the part, numel)
    home: int  # a file of the group that tells of states and scalars


class _Plan:
    """What a rank reads, and what it does with it then."""

    def __init__(
        self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None, ranks: Ranks
    ) -> None:
        self.source = _Source(path)
        self._common = self.source.manifest.common
        self._model, self._optimizer, self._ranks = model, optimizer, ranks
        self._groups = named_groups(units_of(model))
        self._others = {
            name: decode(value, name, lambda entry: self.source.want_tensor(self._common, entry))
            for name, value in self.source.head(self._common).others.items()
        }
        self._to_clear: list[
            torch.Tensor
        ] = []  # before anything is read: states of which a part has no values
        self._refuse_names()
        for named in self._groups:
            self._plan_parameters(named)
        self._state: dict[torch.Tensor, dict[Any, Any]] = {}
        self._settings: list[
            tuple[list[str], dict[str, Any]]
        ] = []  # of each saved group: its parameters' names, and the rest
        if optimizer is not None:
            self._plan_optimizer(optimizer)
        same = len(self.source.manifest.files) == ranks.count
        number = ranks.number if same else 0
        self._extra = decode(
            self.source.head(number).extra,
            "extra",
            lambda name: self.source.want_tensor(number, name),
        )

    def commit(self, shown: bool) -> Any:
        """Change the model and the optimizer; return ``extra``."""
        with torch.no_grad():
            for tensor in self._to_clear:
                tensor.zero_()
            self.source.read(shown)
        load_unmanaged(self._model, self._others)
        if self._optimizer is not None:
            self._commit_optimizer(self._optimizer)
            warn_of_left_out(
                self.source.left_out(), "were not saved, and are what the optimizer has"
            )
        return self._extra

    # -- names and shapes

    def _refuse_names(self) -> None:
        """Raise CheckpointError unless the checkpoint holds the model's parameters, in their
        shapes, and no others."""
        located = self.source.located
        wrong: list[str] = []
        known: set[str] = set()
        for named in self._groups:
            store = store_of(named.group)
            for index in named.params:
                names = named.names(index)
                known.update(names)
                found = next((located[name] for name in names if name in located), None)
                if found is None:
                    wrong.append(f"missing: {names[0]}")
                elif found[0].layout.params[found[1]].shape != store.shape(index):
                    shape = list(found[0].layout.params[found[1]].shape)
                    wrong.append(
                        f"{names[0]}: shape {shape} in the checkpoint, {list(store.shape(index))} "
                        "in the model"
                    )
        others = unmanaged_state(self._model)
        saved = self._others
        known.update(others)
        wrong += [
            f"missing: {name}" for name in others if name not in saved and name not in located
        ]
        wrong += [f"not in the model: {name}" for name in (*located, *saved) if name not in known]
        for name, value in others.items():
            if name in saved and isinstance(value, torch.Tensor):
                its = saved[name]
                if not isinstance(its, torch.Tensor) or its.shape != value.shape:
                    got = (
                        f"shape {list(its.shape)}"
                        if isinstance(its, torch.Tensor)
                        else "not a tensor"
                    )
                    wrong.append(
                        f"{name}: {got} in the checkpoint, shape {list(value.shape)} in the model"
                    )
        if wrong:
            more = f" and {len(wrong) - 20} more" if len(wrong) > 20 else ""
            raise CheckpointError(
                explain(
                    "The checkpoint belongs to another model.",
                    expected="the names and shapes of the model's parameters and buffers",
                    got="; ".join(wrong[:20]) + more,
                    where=str(self.source.path),
                    fix="build the model that was saved; to take a part of a checkpoint, load it "
                    "into that one and go on from its "
                    "state_dict()",
                )
            )

    def _part(self, named: NamedGroup, index: int) -> _Part | None:
        """Return where this rank's elements of a parameter are; None for one that is not among the
        checkpoint's managed ones."""
        located, store = self.source.located, store_of(named.group)
        found = next((located[name] for name in named.names(index) if name in located), None)
        if found is None:
            return None
        group, its_index = found
        axis = self.source.manifest.axes[group.axis]
        part = store.part(index, store.rank)
        runs = tuple(
            (axis[run.rank], run.in_shard.start, run.start, run.in_shard.numel)
            for run in runs_of_part(group.layout, its_index, part)
        )
        home = runs[0][0] if runs else axis[store.rank * len(axis) // store.ranks]
        return _Part(group, its_index, runs, home)

    def _want_part(self, part: _Part, entry: str, dtype: torch.dtype, target: torch.Tensor) -> None:
        for number, start, at, numel in part.runs:
            self.source.want(number, entry, dtype, start, target[at : at + numel])

    # -- parameters

    def _plan_parameters(self, named: NamedGroup) -> None:
        store = store_of(named.group)
        for index in named.params:
            part = self._part(named, index)
            if part is None:
                raise AssertionError(f"{named.names(index)[0]} was looked for before")
            target = store.local_part(index)
            self._want_part(part, part.group.name, part.group.dtype, target)

    # -- the optimizer

    def _plan_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if self.source.manifest.param_groups is None:
            raise CheckpointError(
                explain(
                    "The checkpoint holds no optimizer state.",
                    expected="a checkpoint that was saved with an optimizer",
                    got="one that was saved without",
                    where=str(self.source.path),
                    fix="pass optimizer=None, and begin with the optimizer as it is",
                )
            )
        held = held_by(self._model, optimizer)
        self._settings = [
            (group["params"], _settings_of(group["settings"]))
            for group in self.source.manifest.param_groups
        ]
        mine = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        for named in self._groups:
            store = store_of(named.group)
            for target, indices in named.sharded_params:
                if target in mine and store.has_part(indices):
                    parts = {
                        index: part
                        for index in indices
                        if (part := self._part(named, index)) is not None
                    }
                    entry = self._state_of_target(named, target, parts)
                    if entry:
                        self._state[target] = entry
        managed = {target for named in self._groups for target, _ in named.sharded_params}
        states = self.source.head(self._common).other_states
        for parameter, names in held.items():
            if parameter not in managed and parameter in mine and names[0] in states:
                self._state[parameter] = {
                    key: decode(
                        value,
                        f"state {key!r} of {names[0]}",
                        lambda name: self.source.want_tensor(self._common, name),
                    )
                    for key, value in states[names[0]]
                }

    def _state_of_target(
        self, named: NamedGroup, target: nn.Parameter, parts: Mapping[int, _Part]
    ) -> dict[Any, Any]:
        store = store_of(named.group)
        state: dict[Any, Any] = {}
        cut: dict[Any, torch.Tensor] = {}
        having: dict[Any, int] = {}  # how many of the parameters in it have a state
        for index, part in parts.items():
            numbers = list(dict.fromkeys([*(run[0] for run in part.runs), part.home]))
            place = store.part_in_sharded_param(index)
            for key, entry, dtype in self._per_element(numbers, part):
                if key not in cut:
                    state[key] = self._place_of_state(target, key, dtype)
                    cut[key] = state[key].view(-1)
                having[key] = having.get(key, 0) + 1
                self._want_part(part, entry, dtype, cut[key][place.slice])
            for key, of, value in self.source.head(part.home).scalars.get(part.group.name, []):
                if (of is None or part.index in of) and key not in state:
                    state[key] = decode(value, f"state {key!r}", inlined_again)
            self._add_own(state, named, index, part)
        self._to_clear += [cut[key] for key, number in having.items() if number < len(parts)]
        return state

    def _place_of_state(self, target: nn.Parameter, key: Any, dtype: torch.dtype) -> torch.Tensor:
        """Return the tensor that a state is read to: what the optimizer has, where that is of the
        right kind, or a new one."""
        assert self._optimizer is not None
        present = (self._optimizer.state.get(target) or {}).get(key)
        if type(present) is torch.Tensor and present.is_contiguous():
            fits = (present.dtype, present.shape, present.device) == (
                dtype,
                target.shape,
                target.device,
            )
            return present if fits else torch.zeros(target.shape, dtype=dtype, device=target.device)
        return torch.zeros(target.shape, dtype=dtype, device=target.device)

    def _per_element(
        self, numbers: Sequence[int], part: _Part
    ) -> list[tuple[Any, str, torch.dtype]]:
        """Return (key, entry, dtype) of the states that a parameter has, as any of the files with a
        part of it says."""
        found: dict[Any, tuple[str, torch.dtype]] = {}
        for number in numbers:
            for state in self.source.head(number).states.get(part.group.name, []):
                if state.of is None or part.index in state.of:
                    found.setdefault(state.key, (state.entry, state.dtype))
        return [(key, entry, dtype) for key, (entry, dtype) in found.items()]

    def _add_own(self, state: dict[Any, Any], named: NamedGroup, index: int, part: _Part) -> None:
        """Add what belongs to one rank's part, where this rank has the same part."""
        store, axis = store_of(named.group), self.source.manifest.axes[part.group.axis]
        layout = part.group.layout
        same = same_parts(layout, part.index, *store.cut(index))
        # A flat parameter's own state stands under the first parameter in it, and fits only where
        # all of them lie as they did.
        flat, own = store.is_flattened, named.section.layout
        same = same and (
            not flat or [p.start for p in layout.params] == [p.start for p in own.params]
        )
        number = axis[store.rank] if same else part.home
        for its_index, key, value in self.source.head(number).own.get(part.group.name, []):
            if its_index != part.index:
                continue
            if not same:
                raise CheckpointError(
                    explain(
                        "An optimizer state belongs to one rank's part of a parameter, and the "
                        "parts are others now.",
                        expected=f"{layout.ranks} ranks and the wrapping that it was saved with, "
                        f"for state {key!r}",
                        got=f"{store.ranks} ranks, or another wrapping or use_orig_params",
                        where=f"{named.names(index)[0]}, in {self.source.path}",
                        fix="load with as many ranks and the same wrapping, or load without the "
                        "optimizer",
                    )
                )
            state[key] = decode(
                value, f"state {key!r}", lambda name: self.source.want_tensor(number, name)
            )

    def _commit_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        numbers = {
            p: n
            for n, p in enumerate(p for group in optimizer.param_groups for p in group["params"])
        }
        held = held_by(self._model, optimizer)
        state = {
            p: {key: _on(value, p) for key, value in entry.items()}
            for p, entry in self._state.items()
        }
        saved = self._settings
        by_name = {name: settings for names, settings in saved for name in names}
        groups = []
        for position, group in enumerate(optimizer.param_groups):
            names = [name for parameter in group["params"] for name in held[parameter]]
            match = next(
                (by_name[n] for n in names if n in by_name),
                saved[position][1] if position < len(saved) else {},
            )
            settings = {**{key: value for key, value in group.items() if key != "params"}, **match}
            groups.append(
                {**settings, "params": [numbers[parameter] for parameter in group["params"]]}
            )
        optimizer.load_state_dict(
            {
                "state": {numbers[p]: dict(entry) for p, entry in state.items()},
                "param_groups": groups,
            }
        )
        for (
            parameter,
            entry,
        ) in (
            state.items()
        ):  # torch casts tensors to the dtype of their parameters, and texts to no sense
            for key, value in entry.items():
                kept = optimizer.state[parameter].get(key)
                if not isinstance(value, torch.Tensor) or (
                    isinstance(kept, torch.Tensor) and kept.dtype != value.dtype
                ):
                    optimizer.state[parameter][key] = value


def _settings_of(content: Any) -> dict[str, Any]:
    """Return the settings of a parameter group, decoded. Raises CheckpointError."""
    found = decode(content, "parameter group", inlined_again)
    if not isinstance(found, dict):
        raise CheckpointError(
            explain(
                "A checkpoint holds a parameter group that makes no sense.",
                expected="settings by name",
                got=f"a {type(found).__name__}",
                where="param_groups of the optimizer",
                fix="load an older checkpoint; nothing was loaded",
            )
        )
    return found


def inlined_again(text: str) -> torch.Tensor:
    """The opposite of `_snapshot.inlined`."""
    name, shape, values = parse_json(text.encode("utf-8"))
    dtype = dtype_of(name)
    if dtype.is_complex:
        return torch.view_as_complex(
            torch.tensor(listed(values)).to(dtype.to_real()).view(*sizes(shape), 2)
        ).clone()
    return torch.tensor(listed(values), dtype=dtype).view(sizes(shape))


def _on(value: Any, parameter: torch.Tensor) -> Any:
    """States are where their parameter is; counts stay on the CPU, where optimizers have them."""
    return (
        value.to(parameter.device) if isinstance(value, torch.Tensor) and value.dim() > 0 else value
    )


def _nothing(nbytes: int) -> None:
    return None
