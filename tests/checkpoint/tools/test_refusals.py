"""What each format refuses, whatever asks for it: damaged, hostile and mixed files, and values that
are no dense tensors. Native checkpoints and safetensors files have tables of their own in
tests/checkpoint/test_manifest.py and test_header.py."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.tensor import Partial, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from fsdp_compat.checkpoint.files import convert, verify
from fsdp_compat.errors import CheckpointError
from tests.checkpoint.tools.content import d_tensor, part_of
from tests.support.checkpoints import save_dcp

Change = Callable[[Path], Any]  # of a good checkpoint; returns its path if that is another one
WHOLE = torch.arange(7 * 5.0).view(7, 5)


# -- torch.save: one file


def torch_file(folder: Path) -> Path:
    tree = {"a": torch.arange(6.0), "b": [1, "x"], "c": torch.ones(2, 2)}
    torch.save(tree, folder / "x.pt")
    return folder / "x.pt"


def record(name: str, content: bytes | None) -> Change:
    """Another record of the archive, or none."""

    def change(path: Path) -> None:
        with zipfile.ZipFile(path) as archive:
            records = {each: archive.read(each) for each in archive.namelist()}
        records = {**records, name: content} if content is not None else records
        with zipfile.ZipFile(path, "w") as archive:
            for each in [*records] if content is not None else sorted({*records} - {name}):
                archive.writestr(each, records[each])

    return change


def field(at: int, value: bytes) -> Change:
    """Other bytes in what the archive's directory says of a record."""

    def change(path: Path) -> None:
        content = bytearray(path.read_bytes())
        entry = content.rindex(b"PK\x01\x02", 0, content.rindex(b"x/data/0")) + at
        content[entry : entry + len(value)] = value
        path.write_bytes(content)

    return change


def saved(make: Callable[[], Any]) -> Change:
    return lambda path: torch.save({"a": make()}, path)


def content(change: Callable[[bytes], bytes], name: str = "") -> Change:
    return lambda path: (path / name).write_bytes(change((path / name).read_bytes()))


class Beyond:
    """A tensor that does not lie in its storage of six elements."""

    def __init__(self, offset: int, sizes: tuple[int, ...], strides: tuple[int, ...]) -> None:
        self._place = offset, sizes, strides

    def __reduce__(self) -> Any:
        function, args = torch.arange(6.0).__reduce_ex__(2)[:2]
        return function, (args[0], *self._place, *args[4:])


class Special(torch.Tensor):
    pass


BEYOND: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = [
    *((0, (7,), (1,)), (6, (1,), (1,)), (0, (2, 2), (5, 1)), (1 << 62, (1,), (1,))),
    *((-1, (1,), (1,)), (0, (2,), (-1,)), (0, (2,), (1, 1)), (0, (1,), (1 << 80,))),
    (0, (1 << 40, 1 << 40), (0, 0)),
]
JUNK = (b"", b"\x80\x04N.", b"hello", b"PK\x03\x04", b"\x80\x02\x8a\x0a")
TORCH: dict[str, tuple[Change, str]] = {
    "another byte order": (record("x/byteorder", b"big"), "big-endian"),
    "a short storage": (record("x/data/0", b"1234"), "ends at byte 24 of a storage of 4"),
    "no storage": (record("x/data/0", None), "no record 'data/0'"),
    "no pickle": (record("x/data.pkl", None), "no record 'data.pkl'"),
    "two pickles": (record("y/data.pkl", b"\x80\x02N."), "two records"),
    "code": (record("x/data.pkl", b"\x80\x02cos\nsystem\n."), r"os\.system"),
    "compression": (field(10, struct.pack("<H", 8)), "compressed"),
    "a long record": (field(20, struct.pack("<II", 1 << 20, 1 << 20)), "beyond the end"),
    "a record behind the end": (field(42, struct.pack("<I", 1 << 30)), "without a header"),
    "a record without a header": (field(42, struct.pack("<I", 7)), "without a header"),
    "a sparse tensor": (saved(lambda: torch.eye(2).to_sparse()), "_rebuild_sparse_tensor"),
    "a quantized tensor": (
        saved(lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)),
        "_rebuild_qtensor",
    ),
    "a nested tensor": (
        saved(lambda: torch.nested.nested_tensor([torch.ones(2)])),
        "_rebuild_nested_tensor",
    ),
    "a conjugated tensor": (saved(lambda: torch.ones(2, dtype=torch.cfloat).conj()), "flags"),
    "a subclass": (saved(lambda: torch.ones(2).as_subclass(Special)), "Special"),
    "a module": (saved(lambda: torch.nn.Linear(1, 1)), "Linear"),
    **{
        f"elements {place}": (saved(lambda place=place: Beyond(*place)), "was refused")
        for place in BEYOND
    },
    **{f"{junk!r}": (content(lambda _, junk=junk: junk), "") for junk in JUNK},
    "a file before torch 1.6": (
        lambda path: torch.save({"a": WHOLE}, path, _use_new_zipfile_serialization=False),
        r"since torch 1\.6",
    ),
    "an early end": (content(lambda all: all[:-100]), "copied completely"),
}


# -- torch.distributed.checkpoint


def dcp(folder: Path) -> Path:
    shapes = {"a.weight": (6, 4), "same": (6, 4), "other": (5, 3), "small": (4, 2)}
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    return save_dcp({**tensors, "note": "n" * 50}, folder / "c")


def metadata(change: Callable[[Any], Any]) -> Change:
    def changed(path: Path) -> None:
        found = pickle.loads((path / ".metadata").read_bytes())
        change(found)
        (path / ".metadata").write_bytes(pickle.dumps(found))

    return changed


def place(found: Any, name: str = "a.weight") -> Any:
    return found.storage_data[MetadataIndex(name, (0, 0))]


def placed(**values: Any) -> Change:
    return metadata(lambda found: vars(place(found)).update(values))


def at_the_place_of(name: str, other: str) -> Change:
    return metadata(lambda found: vars(place(found, name)).update(vars(place(found, other))))


def exchanged(name: str, other: str) -> Change:
    def change(found: Any) -> None:
        places, one, two = found.storage_data, place(found, name), place(found, other)
        places[MetadataIndex(name, (0, 0))], places[MetadataIndex(other, (0, 0))] = two, one

    return metadata(change)


def chunks(*boxes: tuple[tuple[int, int], tuple[int, int]]) -> Change:
    def change(found: Any) -> None:
        its = [ChunkStorageMetadata(torch.Size(at), torch.Size(sizes)) for at, sizes in boxes]
        found.state_dict_metadata["a.weight"].chunks = its
        for at, _ in boxes:
            found.storage_data[MetadataIndex("a.weight", at)] = place(found)

    return metadata(change)


def paths(**keys: Any) -> Change:
    return metadata(lambda found: found.planner_data.update(keys))


def instead(make: Callable[[Path], Any], name: str = "__0_0.distcp") -> Change:
    """Something else in the place of a file."""

    def change(path: Path) -> None:
        (path / name).rename(path.parent / "moved")
        make(path / name)

    return change


def _of_another_save(file: Path) -> None:
    save_dcp({"a.weight": torch.ones(1)}, file.parents[1] / "another")
    shutil.copy(file.parents[1] / "another" / file.name, file)


OUTSIDE = ("../c/__0_0.distcp", "/etc/passwd", "a/../../c", "", "a\0b")
DCP: dict[str, tuple[Change, str]] = {
    **{f"the name {name!r}": (placed(relative_path=name), "outside") for name in OUTSIDE},
    "no such file": (placed(relative_path="__9_0.distcp"), "no such file"),
    "a directory": (placed(relative_path="."), "not a regular file"),
    "a range beyond the file": (placed(length=10**15), "where the metadata have bytes"),
    "a huge offset": (placed(offset=2**70), "where the metadata have bytes"),
    "a negative offset": (placed(offset=-5), "below 0"),
    "a range inside of an entry": (placed(offset=100), "__0_0.distcp"),
    "another tensor": (exchanged("a.weight", "other"), "instead of"),
    "two tensors at one place": (at_the_place_of("a.weight", "same"), "two values"),
    "a missing place": (
        metadata(lambda found: found.storage_data.pop(MetadataIndex("a.weight", (0, 0)))),
        "no file has",
    ),
    "a gap": (chunks(((0, 0), (3, 4))), "elements are missing"),
    "an overlap": (chunks(((0, 0), (6, 4)), ((1, 0), (5, 4))), "overlap"),
    "rows without a chunk": (
        metadata(
            lambda found: vars(found.state_dict_metadata["a.weight"]).update(
                size=torch.Size([9, 4])
            )
        ),
        "12 of 36 elements are missing",
    ),
    "a chunk outside": (chunks(((1, 0), (6, 4))), "outside of shape"),
    "an extension": (placed(transform_descriptors=["zstd"]), "extensions"),
    "a long list": (paths(small=("x", 10**9)), "a list of"),
    "many long lists": (paths(small=("a", 60_000), other=("b", 60_000)), "a list of"),
    "a path through a value": (paths(small=("other", "x")), "leads through"),
    "a path twice": (paths(small=("other",)), "two values"),
    "a wrong class": (
        metadata(lambda found: found.state_dict_metadata.update({"a.weight": place(found)})),
        "is a torch",
    ),
    "no places": (
        metadata(lambda found: vars(found).update(storage_data=None)),
        "as torch.dist",
    ),
    "code": (metadata(lambda found: vars(found).update(version=os.system)), "system"),
    "a changed text": (content(lambda all: all.replace(b"nn", b"mn"), "__0_0.distcp"), "checksum"),
    "a file of another save": (instead(_of_another_save), "__0_0.distcp"),
    "a link out": (instead(lambda file: file.symlink_to("../moved")), "outside"),
    "a FIFO": (instead(os.mkfifo), "a FIFO"),
    "another beginning": (content(lambda all: b"XX" + all[2:], "__0_0.distcp"), "__0_0.distcp"),
    "metadata linked to itself": (
        instead(lambda file: file.symlink_to(".metadata"), ".metadata"),
        "symbolic links",
    ),
}


# -- files of ranks


def rank_files(folder: Path) -> Path:
    (folder / "ranks").mkdir()
    for rank in range(4):
        part = part_of(WHOLE, (2, 2), rank, [Shard(0), Shard(1)])
        torch.save({"w": part}, folder / "ranks" / f"rank_{rank}.pth")
    return folder / "ranks"


def files(change: Callable[[list[Path]], Any]) -> Change:
    return lambda path: change(sorted(path.iterdir()))


def each_rank(make: Callable[[int], Any]) -> Change:
    return lambda path: [
        torch.save({"w": make(rank)}, path / f"rank_{rank}.pth") for rank in range(4)
    ]


def d_tensors(**attributes: Any) -> Change:
    """The last of four DTensors has another spec than it should."""

    def make(rank: int) -> Any:
        tensor = d_tensor(torch.ones(1, 2), (4, 2), (4,), rank, [Shard(0)])
        spec = tensor._spec
        for name, value in attributes.items() if rank == 3 else ():
            if name == "shape":
                spec.tensor_meta = spec.tensor_meta._replace(shape=torch.Size(value))
            else:
                setattr(spec.mesh if name == "_coordinate_on_dim" else spec, name, value)
        return tensor

    return each_rank(make)


def _as_of_five(paths: list[Path]) -> None:
    for number, path in enumerate(paths):
        path.rename(path.parent / f"model_world_size_5_rank_{number}.pt")


SPLIT = _StridedShard(0, split_factor=1 << 30)
RANKS: dict[str, tuple[Change, str]] = {
    "a rank without a file": (files(lambda paths: paths[2].unlink()), "no file of rank 2"),
    "the last rank": (files(lambda paths: paths[3].unlink()), "elements are missing"),
    "a fifth rank by name": (files(_as_of_five), "no file of rank 4"),
    "a file twice": (
        files(lambda paths: shutil.copy(paths[0], paths[1])),
        "elements are missing",
    ),
    "one alone": (
        files(lambda paths: paths[0].rename(paths[0].parents[1] / "step_100.pt")),
        "elements are missing",
    ),
    "a file of another run": (
        lambda path: torch.save({"w": WHOLE}, path / "x_world_size_1_rank_0.pt"),
        "one file per",
    ),
    "a whole tensor": (
        files(lambda paths: torch.save({"w": WHOLE}, paths[3])),
        "values of one kind",
    ),
    "other shapes": (each_rank(torch.ones), "w: shape"),
    "code": (files(lambda paths: torch.save({"a": print}, paths[2])), r"builtins?(__)?\.print"),
    "sums": (d_tensors(placements=(Partial(),)), "Partial"),
    "a dim too many": (d_tensors(placements=(Shard(5),)), "Shard"),
    "many splits": (d_tensors(placements=(SPLIT,)), "splits"),
    "another shape": (d_tensors(shape=(12, 2)), "local tensor of shape"),
    "a rank too many": (d_tensors(_coordinate_on_dim=(4,)), "share 4 of 4"),
    "not in its mesh": (d_tensors(_coordinate_on_dim=None), "not in its mesh"),
}

GOOD = {"torch": torch_file, "dcp": dcp, "ranks": rank_files}
CASES = {"torch": TORCH, "dcp": DCP, "ranks": RANKS}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "what"), [(kind, what) for kind in GOOD for what in CASES[kind]])
def test_what_is_damaged_or_hostile_is_refused(tmp_path: Path, kind: str, what: str) -> None:
    path, (change, said) = GOOD[kind](tmp_path), CASES[kind][what]
    found = change(path)
    path = found if isinstance(found, Path) and what == "one alone" else path
    target = tmp_path.with_name(f"{tmp_path.name}.pt")  # not inside of what is read
    with pytest.raises(CheckpointError, match=said) as raised:
        convert(path, target)
    assert not target.exists()
    if "--ignore-class" in str(raised.value):  # it may be right to leave this out
        with pytest.raises(CheckpointError, match=said):
            verify(path)
    else:
        problems = verify(path).problems
        assert problems and all(re.search(said, problem.what) for problem in problems)
