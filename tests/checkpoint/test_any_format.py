"""Loading a checkpoint of another format: what each rank reads, numbered optimizers, and what is
refused on all ranks before anything changes. tests/checkpoint/test_corpus.py has the formats."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.ao.quantization.observer import PerChannelMinMaxObserver
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat import StateDictType, checkpoint
from fsdp_compat.errors import CheckpointError
from tests.checkpoint.corpus.content import take_step
from tests.support.cases import about
from tests.support.checkpoints import (
    flip,
    noted_reads,
    num_read,
    refused,
    save_dcp,
    sharded,
    state_of,
)
from tests.support.odd_model import assert_same, state_by_name
from tests.support.ranks import on_ranks, run_ranks

FRONT_ENDS = ("flat", "flat original", "rows")
SIZE, LAYERS = 256, 6


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(SIZE, SIZE, bias=False) for _ in range(LAYERS)))


def trained(
    model: nn.Module, make: Callable[..., Any] = torch.optim.Adam, backwards: bool = False
) -> Any:
    """backwards: the optimizer has the parameters in reverse."""
    optimizer = make([*model.parameters()][:: -1 if backwards else 1], lr=0.5)
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, 1.0 + number)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def _bytes_read(folder: Path) -> dict[str, tuple[int, int]]:
    """Return how many bytes a load reads, and how many the rank has, by front end and format."""
    found = {}
    for front_end in ("flat", "rows"):
        for name in ("weights", "whole.pt", "dcp"):
            model = sharded(front_end, layers())
            optimizer = trained(model)
            states = [value for state in optimizer.state.values() for value in state.values()]
            with noted_reads() as runs:
                checkpoint.load(folder / name, model, None if name == "weights" else optimizer)
            own = [*model.parameters(), *(() if name == "weights" else states)]
            nbytes = sum(
                (value.to_local() if hasattr(value, "to_local") else value).nbytes for value in own
            )
            found[f"{front_end}, {name}"] = num_read(runs), nbytes
    return found


def test_a_rank_reads_its_own_part_and_its_share_of_the_records_with_checksums(
    tmp_path: Path,
) -> None:
    torch.save(states_of(layers()), tmp_path / "whole.pt")
    checkpoint.files.convert(tmp_path / "whole.pt", tmp_path / "dcp", to="dcp")
    checkpoint.files.convert(tmp_path / "whole.pt", tmp_path / "weights", weights=True)
    record = SIZE * SIZE * 4
    total = 3 * LAYERS * record
    for ranks in (1, 3):
        for by_case in run_ranks(ranks, _bytes_read, tmp_path):
            for case, (read, own) in by_case.items():
                share = 0 if "weights" in case else total / ranks + record
                assert own * 0.99 <= read <= own + share + 4096, case


def states_of(model: nn.Module) -> dict[str, Any]:
    """Return the model and its optimizer after a step, by name."""
    optimizer = state_by_name(model, trained(model))
    return {"model": model.state_dict(), "optimizer": optimizer}


def _write_under_names(folder: Path) -> None:
    """Write files whose optimizer has numbers, or other names than the model."""
    model, ddp = layers(), nn.Sequential()
    ddp.add_module("module", model)
    numbered = trained(model).state_dict()
    (group,) = numbered["param_groups"]
    states = {"model": model.state_dict(), "optimizer": numbered, "epoch": 3}
    torch.save(states, folder / "numbers.pt")
    backwards = trained(layers(), backwards=True).state_dict()
    torch.save({**states, "optimizer": backwards}, folder / "backwards.pt")
    halves = [{**group, "params": group["params"][part]} for part in (slice(2), slice(2, None))]
    torch.save({**states, "optimizer": {**numbered, "param_groups": halves}}, folder / "groups.pt")
    fewer = {number: numbered["state"][number] for number in range(LAYERS - 1)}
    groups = [{**group, "params": group["params"][:-1]}]
    torch.save(
        {**states, "optimizer": {"state": fewer, "param_groups": groups}}, folder / "fewer.pt"
    )

    def write(name: str, weights: Any, names: list[str], by_name: bool) -> None:
        groups = [{**group, "params": names} if by_name else {**group, "param_names": names}]
        state = {names[n] if by_name else n: its for n, its in numbered["state"].items()}
        if name.startswith("without"):
            del state[names[-1]]
            groups[0]["params"] = names[:-1] if "setting" in name else names
        optimizer = {"state": state, "param_groups": groups}
        torch.save({"model": weights.state_dict(), "optimizer": optimizer}, folder / f"{name}.pt")
        checkpoint.files.convert(folder / f"{name}.pt", folder / name, to="native", world_size=3)

    under_ddp = [name for name, _ in ddp.named_parameters()]
    write("numbers of ddp", model, under_ddp, False)
    write("names of ddp", model, under_ddp, True)
    write("model of ddp", ddp, [*model.state_dict()], True)
    write("prefix", model, [f"net.{name}" for name in model.state_dict()], True)
    for name in ("without the last state", "without the last state and setting"):
        write(name, model, [*model.state_dict()], True)


NAMED = [f"{form} of ddp{file}" for form in ("numbers", "names", "model") for file in ("", ".pt")]


def _load_under_names(folder: Path) -> None:
    for front_end in FRONT_ENDS:
        names = [*NAMED, "prefix", "prefix.pt", "numbers.pt"]
        for name in [*names, "backwards.pt"] if front_end == "rows" else names:
            with about(f"{name} into {front_end}"):
                model = sharded(front_end, layers())
                params = [*model.parameters()][:: -1 if "backwards" in name else 1]
                optimizer = torch.optim.Adam(params)
                load = partial(checkpoint.load, folder / name, model, optimizer)
                if "prefix" in name:
                    with refused(CheckpointError, "net.0.weight"):
                        load()
                    assert not optimizer.state
                    with pytest.warns(UserWarning, match="net.0.weight"):
                        load(strict=False)
                    load(rename=lambda name: name.removeprefix("net."))
                else:
                    assert load().extra == ({"epoch": 3} if "of ddp" not in name else None)
                assert optimizer.param_groups[0]["lr"] == 0.5
                found = state_of(model, optimizer)
                for number in range(LAYERS):
                    moment = found[f"state.{number}.weight.exp_avg"]
                    assert torch.all(moment == 0.1 * (1.0 + number))
        for file in ("fewer.pt", "groups.pt"):
            with refused(CheckpointError, "is numbered, and does not fit"):
                checkpoint.load(folder / file, model, optimizer)
        for name, why in (("state", "was not saved"), ("state and setting", "only the new")):
            model = sharded(front_end, layers())
            file = folder / f"without the last {name}.pt"
            warned = pytest.warns(UserWarning, match=f"{LAYERS - 1}.weight, which {why}")
            with warned if dist.get_rank() == 0 else contextlib.nullcontext():
                checkpoint.load(file, model, torch.optim.Adam(model.parameters()))


def test_optimizer_state_is_found_by_numbers_and_names_of_ddp_and_refused_under_others(
    tmp_path: Path,
) -> None:
    _write_under_names(tmp_path)
    for name, is_intact in (("names of ddp", True), ("prefix", False), ("prefix.pt", False)):
        found = checkpoint.files.verify(tmp_path / name)
        assert found.is_intact is is_intact
        assert {each.kind for each in found.problems} == (set() if is_intact else {"optimizer"})
    run_ranks(2, _load_under_names, tmp_path)


def _refused(folder: Path) -> None:
    renamed = {"0.weight": None, "more": "5.weight"}
    for front_end in ("flat", "rows"):
        model = sharded(front_end, layers())
        optimizer = trained(model)
        before = state_of(model, optimizer)
        for name, text in {
            "missing.pt": "missing: 5.weight",
            "damaged.pt": "checksum",
            "shapes.pt": "has another shape than its parameter",
        }.items():
            with about(name), refused(CheckpointError, text):
                checkpoint.load(folder / name, model, optimizer)
            assert_same(state_of(model, optimizer), before, name)
        report = checkpoint.load(folder / "missing.pt", model, optimizer, strict=False)
        assert report.missing == ["5.weight"]
        assert report.unexpected == ["more"]
        with refused(CheckpointError, "missing: 0.weight"):
            checkpoint.load(folder / "missing.pt", model, rename=lambda n: renamed.get(n, n))


def test_what_does_not_fit_or_is_damaged_is_refused_on_all_ranks_before_anything_changes(
    tmp_path: Path,
) -> None:
    states = states_of(layers())
    values, by_name = states["model"], states["optimizer"]
    good = {**states, "model": {name: value + 1 for name, value in values.items()}}
    torch.save(good, tmp_path / "damaged.pt")
    flip(tmp_path / "damaged.pt", (tmp_path / "damaged.pt").stat().st_size // 2)
    fewer = {**good["model"], "more": torch.ones(SIZE, SIZE)}
    del fewer["5.weight"]
    torch.save({**good, "model": fewer}, tmp_path / "missing.pt")
    odd = {**by_name["state"], "0.weight": {"row": torch.ones(SIZE)}}
    torch.save({**good, "optimizer": {**by_name, "state": odd}}, tmp_path / "shapes.pt")
    run_ranks(2, _refused, tmp_path)


def _fitted(folder: Path) -> None:
    def both(front_end: str, name: str) -> tuple[torch.optim.Optimizer, list[Callable[[], Any]]]:
        model, path = sharded(front_end, layers()), folder / f"{name}.pt"
        optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1), foreach=False)

        def load_dict() -> None:
            saved = torch.load(path)["optimizer"]
            optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, saved))

        return optimizer, [load_dict, partial(checkpoint.load, path, model, optimizer)]

    for front_end, number in itertools.product(FRONT_ENDS, (0, 1)):
        with about(f"{front_end}, load {number}"):
            optimizer, loads = both(front_end, "taken")
            loads[number]()
            assert torch.is_tensor(optimizer.param_groups[0]["lr"])
            for state in optimizer.state.values():
                assert (state["mean"].tolist(), state["sizes"]) == ([7.0], [1, 2])
            for name in ("rows", "list", "single"):
                optimizer, loads = both(front_end, name)
                if name == "single" and front_end != "flat":  # as Prodigy keeps zeros
                    loads[number]()
                    dims = [state["exp_avg"].dim() for state in optimizer.state.values()]
                    assert dims.count(0) == (front_end == "rows" or dist.get_rank() == 0)
                    continue
                with refused(CheckpointError, "another shape"):
                    loads[number]()
                assert not optimizer.state


def test_dicts_and_files_agree_on_which_states_are_cut(tmp_path: Path) -> None:
    states = states_of(layers())
    state = states["optimizer"]["state"]
    cases: dict[str, Callable[[str], dict[str, Any]]] = {
        "taken": lambda name: {"mean": torch.tensor([7.0]), "sizes": [1, 2]},
        "single": lambda name: {"exp_avg": torch.tensor(0.0)} if name == "2.weight" else {},
        "rows": lambda name: {"row": torch.ones(SIZE)},
        "list": lambda name: {"parts": [torch.ones(SIZE, SIZE)]},
    }
    for case, of in cases.items():
        changed = {name: {**entry, **of(name)} for name, entry in state.items()}
        optimizer = {**states["optimizer"], "state": changed}
        torch.save({**states, "optimizer": optimizer}, tmp_path / f"{case}.pt")
    run_ranks(2, _fitted, tmp_path)


FORMATS = ("whole.pt", "dcp", "weights", "native")


def _save_all(folder: Path, number: float = 1.0, epoch: int = 3, momentum: float = 0.0) -> Path:
    """Save in all formats: the values are those of ``number``, except for one large tensor."""
    model = layers()
    optimizer = trained(model)
    with torch.no_grad():
        [each.mul_(number) for each in [*model.parameters()][1:]]
        optimizer.state[model[2].weight]["exp_avg"] += momentum
    state = state_by_name(model, optimizer)
    state["param_groups"][0]["lr"] = torch.tensor(0.5)
    folder.mkdir()
    values = {"model": model.state_dict(), "optimizer": state, "epoch": epoch}
    torch.save(values, folder / "whole.pt")
    save_dcp({**values, "model": dict(values["model"])}, folder / "dcp")
    (folder / "weights").mkdir()
    save_file(model.state_dict(), folder / "weights" / "model.safetensors")
    checkpoint.files.convert(folder / "whole.pt", folder / "native", to="native", world_size=2)
    return folder


def _damaged_copy(folder: Path) -> None:
    rank = dist.get_rank()
    for name in FORMATS[:2]:
        path = folder / str(rank) / name
        file = path if path.is_file() else path / "__0_0.distcp"
        states = torch.load(folder / str(rank) / "whole.pt")
        moments = {n: each["exp_avg_sq"] for n, each in states["optimizer"]["state"].items()}
        places = [
            (kind, file.read_bytes().index(values[f"{number}.weight"].numpy().tobytes()))
            for kind, values in (("model", states["model"]), ("optimizer", moments))
            for number in (0, LAYERS - 1)
        ]
        model = sharded("rows", layers())
        optimizer = trained(model)
        before = state_of(model, optimizer)
        for (kind, place), bad in itertools.product(places, (0, 1)):
            dist.barrier()
            flip(file, place) if rank == bad else None
            dist.barrier()
            with about(f"{name}: {kind} at {place}, on rank {bad}"):
                with refused(CheckpointError, "checksum"):
                    checkpoint.load(path, model, optimizer)
                if kind == "model":
                    with refused(CheckpointError, "checksum"):
                        checkpoint.load(path, model)
            flip(file, place) if rank == bad else None
        assert_same(state_of(model, optimizer), before, name)
        dist.barrier()
        checkpoint.load(path, model, optimizer)


def test_each_rank_compares_the_checksums_of_the_copy_that_it_reads(tmp_path: Path) -> None:
    shutil.copytree(_save_all(tmp_path / "0"), tmp_path / "1")
    run_ranks(2, _damaged_copy, tmp_path)


def _several_epochs(folder: Path) -> None:
    is_odd = dist.get_rank() == 1
    for name, other in itertools.product(FORMATS, ("all", "optimizer", "extra")):
        model = sharded("rows", layers())
        optimizer = trained(model)
        given = None if name == "weights" else optimizer
        with about(f"{name}, {other}"):
            checkpoint.load(folder / ("copy" if is_odd else "first") / name, model, given)
            if name == "weights" and other != "all":
                continue
            before = state_of(model, optimizer)
            with refused(CheckpointError, "different checkpoints", "[0, 2], [1]"):
                checkpoint.load(folder / (other if is_odd else "first") / name, model, given)
            assert_same(state_of(model, optimizer), before, name)


def test_ranks_with_files_of_two_epochs_are_told_which_ranks_differ(tmp_path: Path) -> None:
    shutil.copytree(_save_all(tmp_path / "first"), tmp_path / "copy")
    _save_all(tmp_path / "all", 1.01)
    _save_all(tmp_path / "optimizer", momentum=0.5)
    _save_all(tmp_path / "extra", epoch=4)
    run_ranks(3, _several_epochs, tmp_path)


def _replaced(folder: Path) -> None:
    for name in FORMATS[:3]:
        path, newer = folder / "first" / name, folder / "newer" / name
        files = {newer: path} if path.is_file() else {newer / x: path / x for x in os.listdir(path)}
        files = {new: old for new, old in files.items() if old.name != ".metadata"}
        model = sharded("flat", layers())
        before = {name: value.clone() for name, value in model.named_parameters()}
        with about(name), refused(CheckpointError, "replaced"):
            checkpoint.load(path, model, rename=functools.partial(_replace_once, files))
        assert_same(dict(model.named_parameters()), before, name)


def _replace_once(files: dict[Path, Path], name: str) -> str:
    """As ``rename``, which is called between headers and values."""
    while files:
        new, old = files.popitem()
        new.replace(old)
    return name


def test_a_file_that_was_replaced_after_it_was_opened_is_refused(tmp_path: Path) -> None:
    _save_all(tmp_path / "first")
    _save_all(tmp_path / "newer", 1.01)
    run_ranks(1, _replaced, tmp_path)


class Recorder(nn.Linear):
    """Its extra state, and a buffer that it loads in its own way, grow."""

    kind = "tensor"

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.history, self.gain = list[int](), nn.Parameter(torch.tensor(2.0))
        self.register_buffer("queue", torch.empty(0))
        self.register_buffer("late", None)
        self.observer = PerChannelMinMaxObserver()

    def get_extra_state(self) -> Any:
        return {
            "tensor": torch.tensor(self.history, dtype=torch.uint8),
            "file": io.BytesIO(bytes(self.history)),
            "dict": {"history": self.history, "values": torch.tensor(self.history), "n": None},
            "list": self.history,
            "nothing": {},
        }[self.kind]

    def set_extra_state(self, state: Any) -> None:
        if self.kind == "dict":
            assert state["values"].tolist() == state["history"] and state["n"] is None
            state = state["history"]
        if self.kind == "nothing":
            state = [7, 8, 9] if state == {} else []
        self.history = list(state.read() if self.kind == "file" else state)

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        self.queue = torch.empty_like(state[f"{prefix}queue"])
        self.late = torch.empty_like(state[f"{prefix}late"])
        super()._load_from_state_dict(state, prefix, *rest)


def _own_ways(folder: Path) -> None:
    for front_end, Recorder.kind in itertools.product(
        FRONT_ENDS, ("tensor", "file", "dict", "list", "nothing")
    ):
        path = folder / front_end / Recorder.kind
        with about(f"{front_end}, {Recorder.kind}"):
            recorders = Recorder(), Recorder()
            saved, fresh = (sharded(front_end, nn.Sequential(each)) for each in recorders)
            recorders[0].history, recorders[0].queue = [7, 8, 9], torch.arange(4.0)
            recorders[0].late = torch.arange(2.0)
            recorders[0].observer(torch.arange(6.0).view(3, 2))  # makes its buffers larger
            native = checkpoint.save(path, saved, step=1)
            checkpoint.save_safetensors(path, saved)
            states = get_model_state_dict(saved)
            dcp.save({"model": states}, checkpoint_id=path / "dcp")
            states = get_model_state_dict(saved, options=StateDictOptions(full_state_dict=True))
            if dist.get_rank() == 0:
                states |= {"0.gain": states["0.gain"].view(1)}  # as some old files have it
                prefix = "module." if Recorder.kind == "list" else ""  # of DistributedDataParallel
                torch.save({prefix + n: value for n, value in states.items()}, path / "whole.pt")
            dist.barrier()
            for each in (native, path / "dcp", path / "whole.pt", path / "model.safetensors"):
                if Recorder.kind == "nothing" and each.name == "dcp":
                    continue  # torch leaves empty dicts out
                recorders[1].history, recorders[1].queue = [], torch.empty(0)
                recorders[1].late, recorders[1].observer = None, PerChannelMinMaxObserver()
                checkpoint.load(each, fresh)
                assert recorders[1].late.tolist() == [0, 1], each
                assert recorders[1].observer.max_val.tolist() == [1, 3, 5], each
                assert recorders[1].queue.tolist() == [0, 1, 2, 3], each
                if Recorder.kind == "tensor" or each.suffix != ".safetensors":
                    assert recorders[1].history == [7, 8, 9], each


def test_what_modules_load_in_their_own_way_has_the_size_that_was_saved(tmp_path: Path) -> None:
    run_ranks(2, _own_ways, tmp_path)


def _opened(path: Path) -> int:
    """Return how many files of ranks a load opens."""
    model, opened = sharded("flat", layers()), []
    original = os.open

    def noted(path: Any, *args: Any, **keywords: Any) -> int:
        opened.append(str(path))
        return original(path, *args, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", noted)
        checkpoint.load(path, model)
    return len({each for each in opened if "rank-" in each})


def test_a_rank_opens_few_files_of_very_many_ranks(tmp_path: Path) -> None:
    torch.save(layers().state_dict(), tmp_path / "whole.pt")
    checkpoint.files.convert(tmp_path / "whole.pt", tmp_path / "native", world_size=96)
    assert max(run_ranks(2, _opened, tmp_path / "native")) <= 96 / 2 + LAYERS


class Tied(nn.Module):
    """Two layers, which may share a weight."""

    def __init__(self, is_tied: bool) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(4, 4, bias=False) for _ in range(2))
        if is_tied:
            self.second.weight = self.first.weight


@on_ranks(2)
def test_the_state_of_a_tied_parameter_is_that_of_each_of_its_names(tmp_path: Path) -> None:
    for front_end in ("flat", "rows"):
        model = sharded(front_end, Tied(is_tied=True))
        optimizer = trained(model)
        optimizer.param_groups[0]["lr"] = 0.25
        path = checkpoint.save(tmp_path / front_end, model, optimizer, step=1)
        saved = state_of(model, optimizer)
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            of_optimizer = FSDP.optim_state_dict(model, optimizer)
        weights = dict(checkpoint.iter_full_state_dict(model))
        states = {"model": weights, "optimizer": of_optimizer}
        states["model"]["second.weight"] = states["model"]["first.weight"]
        if dist.get_rank() == 0:
            torch.save(states, tmp_path / f"{front_end}.pt")
        dist.barrier()
        for file in (path, tmp_path / f"{front_end}.pt"):
            model = sharded(front_end, Tied(is_tied=False))
            first, second = (
                ([p] for p in model.parameters())
                if front_end == "rows"
                else ([*model.parameters()], [])
            )
            optimizer = torch.optim.Adam([{"params": first}, {"params": second}])
            checkpoint.load(file, model, optimizer)
            found = state_of(model, optimizer)
            for name in ("first", "second"):
                moment = found[f"state.{name}.weight.exp_avg"]
                assert torch.equal(moment, saved["state.first.weight.exp_avg"])
            assert all(g["lr"] == 0.25 for g in optimizer.param_groups if g["params"])


class Counting(torch.optim.Adam):
    """Keeps states that belong to no parameter."""

    def step(self, closure: Any = None) -> Any:
        number = self.state["calls"]["number"] + 1 if "calls" in self.state else 1
        self.state["calls"] = {"number": number, "sums": torch.arange(3.0) * number}
        self.state["seen"] = number
        return super().step(closure)


def _save_counts(folder: Path) -> None:
    for front_end in ("flat", "rows"):
        model = sharded(front_end, layers())
        optimizer = trained(model, Counting)
        take_step(optimizer)
        path = checkpoint.save(folder / front_end, model, optimizer, step=1)
        if dist.get_rank() == 0:
            checkpoint.files.convert(path, folder / f"{front_end}.pt", rename={"seen": "other"})
            checkpoint.files.convert(
                folder / f"{front_end}.pt", folder / f"{front_end} dcp", to="dcp"
            )


def _load_counts(folder: Path) -> None:
    for front_end, saver in itertools.product(("flat", "rows"), repeat=2):
        for file in ("", ".pt", " dcp"):
            model = sharded(front_end, layers())
            optimizer = Counting(model.parameters())
            optimizer.state["own"] = "kept"
            checkpoint.load(folder / f"{saver}{file}", model, optimizer)
            assert (optimizer.state["seen"], optimizer.state["own"]) == (2, "kept")
            assert optimizer.state["calls"]["number"] == 2
            assert torch.equal(optimizer.state["calls"]["sums"], torch.arange(3.0) * 2)
            loaded = FSDP.optim_state_dict_to_load(
                model, optimizer, FSDP.optim_state_dict(model, optimizer)
            )
            assert loaded["state"]["calls"]["number"] == 2


def test_states_of_no_parameter_come_back_on_any_number_of_ranks(tmp_path: Path) -> None:
    run_ranks(3, _save_counts, tmp_path)
    run_ranks(2, _load_counts, tmp_path)
