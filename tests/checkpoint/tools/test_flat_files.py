"""Flat parameters come apart into the parameters of the model, with shapes from elsewhere, if these
add up; otherwise an error says what does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_compat.checkpoint._tools.archive import Archive, of_memory
from fsdp_compat.checkpoint._tools.rank_files import read_rank_files
from fsdp_compat.checkpoint._tools.reading import Files, read
from fsdp_compat.checkpoint._tools.shapes import (
    Shape,
    Shapes,
    shapes_from_callable,
    shapes_of,
    shapes_of_archive,
)
from fsdp_compat.errors import CheckpointError, UsageError
from tests.support.ranks import run_ranks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.norm = nn.BatchNorm1d(5)
        self.second = nn.Linear(5, 3, bias=False)


class Model(nn.Module):
    """Nested units, buffers, a scalar, and a tied weight; no size is a multiple of anything."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 3)
        self.scale = nn.Parameter(torch.tensor([0.5]))
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(3, 7)
        self.head.weight = self.embedding.weight
        self.register_buffer("table", torch.arange(3.0))
        self.register_buffer("unsaved", torch.arange(2.0), persistent=False)


def make_model(dtype: torch.dtype = torch.float32) -> Model:
    torch.manual_seed(0)
    model = Model()
    for param in model.parameters():
        param.data = torch.randn_like(param)
    return model.to(dtype)


def _save(directory: Path, dtype: torch.dtype, is_ours: bool) -> None:
    if is_ours:
        from fsdp_compat import FullyShardedDataParallel, StateDictType
    else:
        from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
    for use_orig_params in (False, True):
        model = make_model(dtype)
        options: dict[str, Any] = {
            "device_id": torch.device("cpu"),
            "use_orig_params": use_orig_params,
        }
        for block in model.blocks:
            block.second = FullyShardedDataParallel(block.second, **options)
        for number in range(2):
            model.blocks[number] = FullyShardedDataParallel(model.blocks[number], **options)
        whole = FullyShardedDataParallel(model, **options)
        with FullyShardedDataParallel.state_dict_type(whole, StateDictType.LOCAL_STATE_DICT):
            values = whole.state_dict()
        name = f"orig_{use_orig_params}_rank{dist.get_rank()}.pt"
        torch.save({"model": values, "epoch": 3}, directory / name)


KEYS = [  # number of ranks, dtype, and whether the files are ours
    (2, torch.float32, False),
    (4, torch.float32, False),
    (4, torch.float64, False),
    (3, torch.bfloat16, False),
    (4, torch.float32, True),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Path]:
    """Directories by key."""
    found = {key: tmp_path_factory.mktemp("local") for key in KEYS}
    for key, path in found.items():
        run_ranks(key[0], _save, path, *key[1:])
    return found


def paths_of(directory: Path, use_orig_params: bool) -> list[Path]:
    return sorted(directory.glob(f"orig_{use_orig_params}_*"))


def require_model(archive: Archive, expected: nn.Module) -> None:
    with Files() as files:
        for name, values in expected.state_dict().items():
            found = archive.tensors[archive.aliases.get(name, name)]
            assert torch.equal(read(found, files), values), name
    assert {*archive.tensors, *archive.aliases} == set(expected.state_dict())


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("key", KEYS, ids=str)
def test_local_files_give_the_model_with_its_shapes(
    saved: dict[Any, Path], key: Any, use_orig_params: bool
) -> None:
    num, dtype, is_ours = key
    model = make_model(dtype)
    archive = read_rank_files(paths_of(saved[key], use_orig_params), shapes_of(model))
    require_model(archive, model)
    assert archive.aliases == {"head.weight": "embedding.weight"}
    assert (archive.world_size, archive.extra, archive.left_out) == (num, {"epoch": 3}, [])
    if is_ours:  # these say where their parameters are
        archive = read_rank_files(paths_of(saved[key], use_orig_params))
        assert {*archive.tensors, "head.weight"} == set(model.state_dict())


@pytest.mark.parametrize("source", ["ties", "no ties", "sorted"])
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_shapes_of_a_full_checkpoint_do_where_buffers_and_ties_are_not_marked(
    saved: dict[Any, Path], use_orig_params: bool, source: str
) -> None:
    model = make_model()
    full = Archive(Path("full"), "safetensors" if source == "sorted" else "torch.save", {})
    for name, values in model.state_dict().items():
        full.tensors[name] = of_memory(name, values)
    if source != "no ties":
        del full.tensors["head.weight"]
    if source == "ties":
        full.aliases["head.weight"] = "embedding.weight"
    if source == "sorted":
        full.tensors = dict(sorted(full.tensors.items()))
    paths, shapes = paths_of(saved[KEYS[1]], use_orig_params), shapes_of_archive(full)
    if source == "sorted" and not use_orig_params:  # nothing says where each parameter lies
        with pytest.raises(CheckpointError, match="order of the parameters"):
            read_rank_files(paths, shapes)
    else:
        require_model(read_rank_files(paths, shapes), model)


WRONG = "blocks.1.first.weight"  # of 15 elements, and a gap of 1 with use_orig_params=True


@pytest.mark.parametrize(
    ("use_orig_params", "numel", "message"),
    [
        (False, None, "fsdp-compat shapes"),
        (True, None, "fsdp-compat shapes"),
        (False, 20, rf"blocks\.1\._flat_param(.|\n)*{WRONG} 20"),
        (True, 14, rf"blocks\.1\._flat_param(.|\n)*{WRONG} 15"),
        (True, 16, rf"blocks\.1\._flat_param(.|\n)*{WRONG} 15"),
    ],
)
def test_shapes_that_are_missing_or_do_not_add_up_are_refused(
    saved: dict[Any, Path], use_orig_params: bool, numel: int | None, message: str
) -> None:
    known = shapes_of(make_model())
    shapes = None
    if numel is not None:
        wrong = {**known.entries, WRONG: Shape((numel,), torch.float32)}
        shapes = Shapes(wrong, known.ties)
    with pytest.raises(CheckpointError, match=message):
        read_rank_files(paths_of(saved[KEYS[1]], use_orig_params), shapes)


# -- shapes


def test_shapes_are_written_and_read_again(tmp_path: Path) -> None:
    with torch.device("meta"):
        shapes = shapes_of(Model())
    assert shapes == shapes_of(make_model())
    assert list(shapes.ties) == ["head.weight"]
    (tmp_path / "model.json").write_text(shapes.as_text())
    assert Shapes.load(tmp_path / "model.json") == shapes


def test_other_texts_are_no_shapes(tmp_path: Path) -> None:
    text, path = shapes_of(Block()).as_text(), tmp_path / "model.json"
    changes = {
        '"version": 1': '"version": 2',
        "float32": "float3",
        "true": "1",
        '"shape": [': "[-1,",
    }
    changed = [text.replace(old, new) for old, new in changes.items()]
    for wrong in ("", "[1]", text[:-9], *changed, '{"a":' * 99_999):
        path.write_text(wrong)
        with pytest.raises(CheckpointError, match=r"model\.json"):
            Shapes.load(path)


def test_shapes_come_from_a_function_in_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_models_for_shapes.py").write_text(
        "import torch\n\n\ndef make():\n    return torch.nn.Linear(1 << 20, 1 << 20)\n\n\n"
        "def fail():\n    raise OSError('no weights here')\n\n\nnumber = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    shapes = shapes_from_callable("my_models_for_shapes:make")
    assert shapes.entries["weight"].sizes == (1 << 20, 1 << 20)
    for place, got in [
        ("my_models_for_shapes", "no colon"),
        ("my_models_for_shapes:fail", "no weights here"),
        ("my_models_for_shapes:number", "int"),
        ("my_models_for_shapes:missing", "missing"),
        ("no_such_module_here:make", "no_such_module_here"),
    ]:
        with pytest.raises(UsageError, match=got):
            shapes_from_callable(place)
