"""From any format to any other, bit for bit; and a result that is complete or not there."""

from __future__ import annotations

import json
import os
import signal
import warnings
from collections import Counter, OrderedDict, deque
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from fsdp_compat import checkpoint
from fsdp_compat.checkpoint.files import convert, inspect
from fsdp_compat.errors import CheckpointError, UsageError
from tests.checkpoint.tools.content import assert_reference, content_of
from tests.checkpoint.tools.program import run
from tests.support import checkpoints, odd_model
from tests.support.checkpoints import assert_same, flip, refused
from tests.support.pairwise import each_value
from tests.support.ranks import on_ranks

SUFFIX = {"safetensors-file": ".safetensors", "torch": ".pt"}
FORMATS = {  # and whether they hold an optimizer
    **{"safetensors": False, "safetensors-file": False},
    **{"torch": True, "dcp": True, "native": True},
}


def to(name: str, source: Path, target: Path, **settings: Any) -> Path:
    """Convert to a format: to a new path in a folder, or to ``target`` and the format's suffix."""
    if target.is_dir():
        target /= str(sum(1 for _ in target.iterdir()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of values that the target does not hold
        return convert(
            source, target.with_name(target.name + SUFFIX.get(name, "")), to=name, **settings
        )


@each_value
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", checkpoints.KINDS)
def test_checkpoints_of_every_kind_become_every_other_bit_for_bit(
    kind: str, ranks: int, tmp_path: Path
) -> None:
    made = checkpoints.make(kind, ranks, tmp_path)
    is_local = kind.startswith("fsdp1-local")
    torch.save(checkpoints.unsharded().state_dict(), tmp_path / "shapes.pt")
    has_optimizer = not is_local and kind != "ours-safetensors"
    names = made["optimizer"]["param_groups"][0]["params"] if kind == "ddp" else None  # numbered
    out = tmp_path / "out"
    out.mkdir()
    for name in ("torch", "native"):
        written = to(
            name,
            made["path"],
            out,
            shapes=tmp_path / "shapes.pt" if is_local else None,
            optimizer_names=names,
            world_size=ranks % 3 + 2 if name == "native" else None,
            unit=r"blocks\.\d+\.|words\." if name == "native" else None,
        )
        assert_reference(written, made, has_optimizer)


def test_every_format_becomes_every_other(tmp_path: Path) -> None:
    made = checkpoints.make("ours-native", 2, tmp_path)
    folder = tmp_path / "out"
    folder.mkdir()
    written = {name: to(name, made["path"], folder) for name in FORMATS}
    for name, source in written.items():
        for other, holds_optimizer in FORMATS.items():
            ranks = {"world_size": 3} if other in ("dcp", "native") else {}
            again = to(other, source, folder, **ranks)
            content = assert_reference(again, made, FORMATS[name] and holds_optimizer)
            if name == "native" and other == "torch":
                assert content.extra == {"epoch": 2}


def test_what_is_taken_and_how_it_is_called(tmp_path: Path) -> None:
    made = checkpoints.make("ours-native", 2, tmp_path)
    half = content_of(
        convert(
            made["path"],
            tmp_path / "half.pt",
            include=["blocks", "words"],
            exclude=["bias", "table"],
            rename=[(r"^blocks\.(\d+)", r"layers.\1"), (r"\.up\.", ".in.")],
            dtype=torch.float16,
        )
    )
    names = [
        *("layers.0.down.weight", "layers.0.in.weight", "layers.1.down.weight"),
        *("layers.1.in.weight", "words.embed.weight"),
    ]
    assert sorted(half.model) == [*names, "words.head.weight"]
    assert half.facts.aliases == {"words.head.weight": "words.embed.weight"}
    assert {tensor.dtype for tensor in half.model.values()} == {torch.float16}
    assert sorted(half.states) == names  # a tie has its state once
    assert half.states["layers.0.in.weight"]["exp_avg"].dtype == torch.float32
    expected = made["model"]["blocks.1.up.weight"].to(torch.float16)
    assert_same(half.model["layers.1.in.weight"], expected, "values")
    assert [sorted(group["params"]) for group in half.groups or []] == [names]


def test_weights_are_the_model_alone(tmp_path: Path) -> None:
    made = checkpoints.make("ours-native", 2, tmp_path)
    written = to("torch", made["path"], tmp_path / "weights", weights=True)
    found = torch.load(written, weights_only=True)
    assert found.keys() == made["model"].keys()
    assert all(torch.equal(found[name], values) for name, values in made["model"].items())


def test_what_torchs_converter_writes_keeps_its_containers_and_names(tmp_path: Path) -> None:
    weight = torch.randn(3, 2)
    model = {"_orig_mod.a": weight.detach(), "_orig_mod.b": weight.detach()}
    app = {"model": model, "seen": [torch.ones(2), 7]}
    saved = {"app": app, "step": 12, "module.w": torch.arange(3)}
    dcp.save(saved, checkpoint_id=tmp_path / "dcp", no_dist=True)
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "theirs.pt")
    torch.save(saved, tmp_path / "tied.pt")
    ours, again = (
        to("torch", tmp_path / source, tmp_path / f"{source}-2", as_saved=True)
        for source in ("dcp", "tied.pt")
    )
    texts = [
        json.dumps(torch.load(path, weights_only=True), default=torch.Tensor.tolist)
        for path in (ours, again, tmp_path / "theirs.pt")
    ]
    assert texts[0] == texts[2] and json.loads(texts[1]) == json.loads(texts[2])
    one, other = torch.load(again, weights_only=True)["app"]["model"].values()
    assert one.data_ptr() == other.data_ptr()


def test_large_models_get_several_files_and_what_is_not_written_is_named(tmp_path: Path) -> None:
    made = checkpoints.make("ddp", 1, tmp_path)
    told = r"not written to .*optimizer state \(safetensors holds weights only\)"
    with pytest.warns(UserWarning, match=told):
        path = convert(made["path"], tmp_path / "weights", max_file_size=300)
    assert len(list(path.glob("*.safetensors"))) > 2
    assert_reference(path, made, has_optimizer=False)


def test_numbered_optimizer_state_gets_names_from_the_caller_alone(tmp_path: Path) -> None:
    made = checkpoints.make("ddp", 1, tmp_path)
    source, names = made["path"], made["optimizer"]["param_groups"][0]["params"]
    with pytest.warns(UserWarning, match="parameters are numbered.*--optimizer-names"):
        path = convert(source, tmp_path / "weights", to="native")
    assert content_of(path).groups is None
    kept = content_of(convert(source, tmp_path / "kept.pt"))
    assert list(kept.states) == [*range(len(names))]

    (tmp_path / "names.json").write_text(json.dumps(names))
    option = ("--optimizer-names", tmp_path / "names.json")
    result = run("convert", source, tmp_path / "native", "--to", "native", *option)
    assert result.exit_code == 0, result.output
    assert_reference(tmp_path / "native", made)

    few = f"{len(names) - 1} different names for {len(names)}"
    for wrong, said in (
        (names[1:], few),
        (["0.gamma", *names[1:]], "'0.gamma', which no tensor"),
        (["words.table", *names[1:]], "'words.table', of shape [3, 2], as number 0"),
    ):
        with refused(UsageError, said):
            convert(source, tmp_path / "wrong", to="native", optimizer_names=wrong)
    with pytest.raises(UsageError, match="by name, or none"):
        convert(tmp_path / "native", tmp_path / "wrong", optimizer_names=names)


def test_module_in_front_of_every_name_is_ddps_unless_the_caller_says_otherwise(
    tmp_path: Path,
) -> None:
    model = {"module.weight": torch.ones(2, 2), "module.my_orig_mod.bias": torch.ones(1)}
    names = [*model]
    source = tmp_path / "x.pt"
    optimizer = {"state": {names[0]: {"m": torch.ones(2, 2)}}, "param_groups": [{"params": names}]}
    torch.save({"model": model, "optimizer": optimizer}, source)
    plain = [name.removeprefix("module.") for name in names]
    for keep_module, expected in ((False, plain), (True, names)):
        option = ["--keep-module"] if keep_module else []
        target = tmp_path / f"{keep_module}"
        assert not run("convert", source, target, "--to", "native", *option).exit_code
        for found in (content_of(target), content_of(source, keep_module=keep_module)):
            assert set(found.model) == set(expected)
            assert list(found.states) == expected[:1]
            assert set((found.groups or [{}])[0]["params"]) == set(expected)
    # Native checkpoints say what the names are: nothing is removed.
    back = convert(tmp_path / "True", tmp_path / "back.pt")
    assert set(torch.load(back, weights_only=True)["model"]) == set(names)


class Stopped(Exception):
    pass


def test_an_interrupted_or_killed_conversion_leaves_nothing_and_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = checkpoints.make("ours-native", 2, tmp_path)
    folder = tmp_path / "out"
    folder.mkdir()
    for name, holds_optimizer in FORMATS.items():
        path = folder / f"result{SUFFIX.get(name, '')}"
        for end in ("raises", "is killed"):
            child = os.fork()
            if not child:
                status = 3
                try:
                    at_rename(monkeypatch, end)
                    to(name, made["path"], folder / "result")
                except Stopped:
                    status = 7
                finally:
                    os._exit(status)
            _, status = os.waitpid(child, 0)
            if end == "raises":
                assert os.waitstatus_to_exitcode(status) == 7
                assert list(folder.iterdir()) == []
            else:
                assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
                assert [file.name.startswith(".result") for file in folder.iterdir()] == [True]
        to(name, made["path"], folder / "result")  # removes what the killed one left
        assert list(folder.iterdir()) == [path]
        assert_reference(path, made, holds_optimizer)
        path.rename(tmp_path / f"done-{name}")


def at_rename(monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    """Make the process end, in one of two ways, when everything is written but not renamed."""

    def rename(path: Path, target: Path) -> None:
        if path.name == "content":
            if end == "is killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise Stopped
        os.rename(path, target)

    monkeypatch.setattr(Path, "rename", rename)


def test_wrong_arguments_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    made = checkpoints.make("ours-native", 2, tmp_path)
    source = made["path"]
    exists = tmp_path / "exists.pt"
    exists.write_bytes(b"mine")
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"to": "zip"}, "to"),
        ({"to": "torch", "target": tmp_path / "a.safetensors"}, "a name for torch"),
        ({"target": exists}, "exists"),
        ({"target": source / "inside.pt"}, "outside of the source"),
        ({"dtype": torch.int64}, "dtype"),
        ({"unit": "(", "to": "native"}, "unit"),
        ({"unit": r"layers\.\d+"}, 'a target of "native", not safetensors'),
        ({"target": tmp_path / "out.ZIP"}, "a name of a known format"),
        ({"target": "a\0b"}, "without NUL characters"),
        ({"include": ["nothing like it"]}, "No tensor matches"),
        ({"rename": [("(", "x")]}, "rename"),
        ({"rename": lambda name: "same"}, "same name"),
        ({"to": "torch", "as_saved": True, "weights": True}, "nothing is renamed"),
    ]
    before = sorted(tmp_path.iterdir())
    for settings, said in wrong:
        with refused(UsageError, said):
            convert(source, settings.pop("target", tmp_path / "out"), **settings)
    assert sorted(tmp_path.iterdir()) == before
    assert exists.read_bytes() == b"mine"
    with pytest.raises(CheckpointError, match="nothing at this path"):
        convert(tmp_path / "missing", tmp_path / "out")


def test_a_changed_byte_in_a_file_with_checksums_is_refused(tmp_path: Path) -> None:
    # 12 MB in two files: beyond the block that has the header
    torch.save({"weight": torch.zeros(3, 1 << 20)}, tmp_path / "x.pt")
    source = convert(tmp_path / "x.pt", tmp_path / "step-0", to="native", world_size=2)
    (tmp_path / "x.pt").unlink()
    flip(source / "rank-00001.safetensors", -1)
    for name, suffix in SUFFIX.items():
        with pytest.raises(CheckpointError, match=r"rank-00001.*has changed since it was saved"):
            convert(source, tmp_path / f"out{suffix}", to=name)
    assert list(tmp_path.iterdir()) == [source]


VALUES: dict[str, Any] = {
    "array": numpy.arange(6, dtype=numpy.int16).reshape(2, 3),
    "number": torch.tensor(1.5),
    "none": torch.empty(0, 2),
    "ordered": OrderedDict([("b", 1), ("a", torch.ones(2))]),
    "recent": deque([1.0, 2.0], maxlen=3),
    "counts": Counter("abca"),
    "keys": {1: "one", (2, 3): b"two"},
}


@on_ranks(1)
def test_extra_values_and_settings_keep_their_types_in_a_native_target(tmp_path: Path) -> None:
    model = checkpoints.ours_fsdp1(checkpoints.unsharded())
    optimizer = checkpoints.trained(model)
    (group,) = optimizer.param_groups
    group["lr"] = torch.tensor(0.5)
    state = optimizer.state[group["params"][0]]
    state |= {0: 3, "1": 4}
    source = checkpoint.save(tmp_path / "runs", model, optimizer, VALUES, step=17)
    converted = convert(source, tmp_path / "native", to="native", world_size=2)
    for path in (source, converted):
        group["lr"] = torch.tensor(0.0)
        extra = checkpoint.load(path, model, optimizer).extra
        array, own = extra.pop("array"), {**VALUES}
        assert repr(array) == repr(own.pop("array"))
        assert {key: type(value) for key, value in extra.items()} == {
            key: type(value) for key, value in own.items()
        }
        odd_model.assert_same(extra, own)
        assert list(extra["ordered"]) == ["b", "a"] and extra["recent"].maxlen == 3
        assert float(optimizer.param_groups[0]["lr"]) == 0.5
        state = optimizer.state[optimizer.param_groups[0]["params"][0]]
        assert (state.pop(0), state.pop("1")) == (3, 4)
    file = convert(source, tmp_path / "file.pt")
    assert torch.load(file, weights_only=True)["optimizer"]["param_groups"][0]["lr"] == 0.5
    again = convert(convert(source, tmp_path / "dcp", to="dcp"), tmp_path / "again", to="native")
    extra = checkpoint.load(again, model, optimizer).extra
    assert_same(extra["number"], VALUES["number"], "number")


def test_a_native_target_names_the_optimizer_of_a_native_source(tmp_path: Path) -> None:
    made = checkpoints.make("ours-native", 2, tmp_path)
    written = convert(made["path"], tmp_path / "native", to="native", world_size=3)
    manifest = json.loads((written / "manifest.json").read_text())["content"]
    assert manifest["optimizer_classes"] == ["torch.optim.adam.Adam"]


@on_ranks(2)
def test_a_native_target_holds_extra_tensors_once_for_all_ranks(tmp_path: Path) -> None:
    average = torch.arange(5000.0)
    model = checkpoints.ours_fsdp1(checkpoints.unsharded())
    content = {"model": checkpoints.unsharded().state_dict(), "average": average}
    for ranks in (3, 2):
        source, written = tmp_path / f"{ranks}.pt", tmp_path / str(ranks)
        if dist.get_rank() == 0:
            torch.save(content, source)
            convert(source, written, to="native", world_size=ranks)
        dist.barrier()
        sizes = [file.stat().st_size for file in sorted(written.glob("rank-*"))]
        assert [size > 5000 * 4 for size in sizes] == [True, *[False] * (ranks - 1)]
        assert torch.equal(checkpoint.load(written, model).extra["average"], average)
        found = inspect(written)
        extra = [tensor.path for tensor in found.tensors if tensor.section == "extra"]
        assert (extra, found.left_out) == (["extra/average"], ())


def test_a_tie_without_its_first_name_keeps_its_optimizer_state(tmp_path: Path) -> None:
    made = checkpoints.make("ours-native", 2, tmp_path)
    given = {"exclude": ["embed"], "rename": {"words.embed.weight": None}}
    for name, value in given.items():
        path = convert(made["path"], tmp_path / f"{name}.pt", **{name: value})
        found = content_of(path)
        assert "words.embed.weight" not in found.model
        assert "words.head.weight" in found.states
        (group,) = found.groups or []
        assert "words.head.weight" in group["params"]
