"""The folder of checkpoints: what latest() finds, what keep_last removes, what the next save clears
up, and what they leave."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat import checkpoint
from fsdp_compat.checkpoint import latest
from fsdp_compat.errors import CheckpointError, FsdpCompatError, StateError, UsageError
from tests.support.checkpoints import (
    before_syncs,
    change_manifest,
    open_files,
    path_of,
    refused,
)
from tests.support.ranks import on_ranks

IDENTITY = "0123456789abcdef" * 2


def _model(size: int = 3) -> FSDP:
    return FSDP(nn.Linear(size, size))


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def _fail(error: BaseException, where: Callable[[Path], bool]) -> Callable[[Path], None]:
    def act(path: Path) -> None:
        if where(path):
            raise error

    return act


def _owner(folder: Path) -> str:
    """Return the name of the file in a hidden directory whose owner is on this machine."""
    found: set[str] = set()
    folder.mkdir()
    torch.save({"w": torch.ones(1)}, folder / "weights.pt")
    with before_syncs(lambda _: found.update(each.name for each in folder.rglob(".owner-*"))):
        checkpoint.files.convert(folder / "weights.pt", folder / "new.pt")
    return found.pop()


@on_ranks(1)
def test_only_directories_with_a_manifest_of_their_step_are_loaded_or_removed(
    tmp_path: Path,
) -> None:
    """What is not ours looks like it: the name, and a file called manifest.json."""
    root, model = tmp_path / "run", _model()
    for step in (1, 5):
        checkpoint.save(root, model, step=step)
    manifest = (root / "step-00000001" / "manifest.json").read_text()
    foreign = {
        "step-00000002": "{}",
        "step-00000003": manifest,  # of another step
        "step-\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0664": manifest,
        "step-000000001": manifest,  # as no save names it
        "step-00000009": '{"content": {}}',
    }
    for name, manifest in foreign.items():
        (root / name).mkdir()
        (root / name / "manifest.json").write_text(manifest)
    (root / "step-00000008" / "manifest.json").mkdir(parents=True)
    (root / "step-00000010").mkdir()
    os.symlink("manifest.json", root / "step-00000010" / "manifest.json")  # which cannot be opened
    os.mkfifo(root / "step-00000011")
    linked = checkpoint.save(root, model, step=0)
    linked.rename(root.parent / "moved")
    linked.symlink_to(root.parent / "moved")
    with pytest.warns(UserWarning, match="step-00000009 was skipped: manifest.json is damaged"):
        assert checkpoint.latest(root) == root / "step-00000005"
    checkpoint.save(root, model, step=6, keep_last=1)
    stay = ("00", "06", "08", "10", "11")
    assert _names(root) == {*foreign, *(f"step-000000{step}" for step in stay)}
    checkpoint.load(linked, model)


@on_ranks(2)
def test_steps_are_never_overwritten_and_old_ones_are_removed_on_request(tmp_path: Path) -> None:
    folder, model = tmp_path / "made" / "on the way", _model()
    assert checkpoint.latest(folder) is None
    for step in (1, 5, 3):
        checkpoint.save(folder, model, step=step)
    assert checkpoint.latest(folder) == folder / "step-00000005"
    with refused(UsageError, "step-00000003"):
        checkpoint.save(folder, model, step=3)
    for step, left in ((4, {3, 4, 5}), (6, {5, 6})):
        checkpoint.save(folder, model, step=step, keep_last=2)
        dist.barrier()
        assert _names(folder) == {f"step-0000000{n}" for n in left}
        dist.barrier()


@on_ranks(2)
def test_the_next_save_removes_leftovers_of_killed_saves_and_no_directory_of_a_living_one(
    tmp_path: Path,
) -> None:
    root, model = tmp_path / "run", _model()
    root.mkdir(exist_ok=True)
    here, other = _owner(tmp_path / f"{dist.get_rank()}"), ".owner-elsewhere"
    old, living = time.time() - 2 * 86400, list[int]()
    first = dist.get_rank() == 0

    def left(step: int, owner: str | None, *, age: float | None = None, lives: bool = False) -> str:
        path = root / f".step-{step:08d}-{IDENTITY}"
        path.mkdir()
        (path / "rank-00000.safetensors").write_bytes(b"1234")
        if owner is not None:
            (path / owner).touch()
            if lives:
                living.append(os.open(path / owner, os.O_RDWR))
                fcntl.flock(living[-1], fcntl.LOCK_EX)
        if age is not None:
            for file in (*path.iterdir(), path):
                os.utime(file, (age, age))
        return path.name

    if first:
        gone = [left(1, here), left(2, other, age=old), left(3, None, age=old)]
        stays = [left(4, here, lives=True), left(5, other), left(6, None)]
        stays.append(left(7, here, age=old, lives=True))
        (root / f".step-00000008-{IDENTITY}").mkdir()  # killed before it was owned
        (root / f".removed-{IDENTITY}").mkdir()  # killed while it removed an old one
        (root / f".removed-{IDENTITY}" / "manifest.json").touch()
        for name in (".step-1-mine", ".removed", ".step-00000001", "step-notes"):
            (root / name).mkdir()
        (root / f".step-00000010-{IDENTITY}").write_text("a file")
        os.symlink(root / stays[0], root / f".step-00000011-{IDENTITY}")
        before = _names(root)
    dist.barrier()
    checkpoint.save(root, model, step=20)
    if first:
        removed = {*gone, f".step-00000008-{IDENTITY}", f".removed-{IDENTITY}"}
        assert _names(root) == before - removed | {"step-00000020"}
        assert all(
            (root / name / "rank-00000.safetensors").read_bytes() == b"1234" for name in stays
        )
        assert len(_names(root / "step-00000020")) == 3  # the manifest, and a file per rank
        for descriptor in living:
            os.close(descriptor)
    dist.barrier()
    checkpoint.async_save(root, model, step=21).wait()
    if first:
        assert not _names(root) & {stays[0], stays[3]}


@on_ranks(4)
def test_two_jobs_save_into_one_folder(tmp_path: Path) -> None:
    """Two models, on two ranks each, save into one folder at the same time."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    job = dist.get_rank() // 2
    model = FSDP(nn.Linear(3, 3), process_group=groups[job])
    steps = range(job, 6, 2)
    saves = [checkpoint.async_save(tmp_path, model, extra=job, step=n, keep_last=2) for n in steps]
    for save in saves:
        save.wait()
    dist.barrier()
    path = checkpoint.latest(tmp_path)
    assert path == tmp_path / "step-00000005"
    newest = {0: "step-00000004", 1: "step-00000005"}[job]
    if (tmp_path / newest).exists():
        assert checkpoint.load(tmp_path / newest, model).extra == job
    dist.barrier()
    assert all(name.startswith("step-") for name in _names(tmp_path))


@on_ranks(2)
def test_a_save_whose_folder_cannot_be_synced_says_that_the_checkpoint_is_complete(
    tmp_path: Path,
) -> None:
    root, model = tmp_path, _model()
    checkpoint.save(root, model, step=1)
    told = r"checkpoint is complete(.|\n)*rank 0: OSError: .*Input/output error"
    with before_syncs(_fail(OSError(errno.EIO, "Input/output error"), lambda path: path == root)):
        for step, save in enumerate(SAVES, 2):
            with pytest.raises(CheckpointError, match=told):
                save(root, model, step=step, keep_last=1)
            dist.barrier()
            assert checkpoint.latest(root) == root / f"step-{step:08d}"
    checkpoint.load(root / "step-00000003", model)
    dist.barrier()
    assert len(_names(root)) == 3  # keep_last has removed none


SAVES: tuple[Callable[..., Any], ...] = (
    checkpoint.save,
    lambda *args, **given: checkpoint.async_save(*args, **given).wait(),
)


@on_ranks(2)
def test_no_node_removes_or_keeps_a_checkpoint_unless_all_nodes_have_the_new_one(
    tmp_path: Path,
) -> None:
    rank = dist.get_rank()
    root, model = tmp_path / f"node {rank}", _model()
    checkpoint.save(root, model, step=1)
    full, interrupt = OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()
    unchanged = r"rank 1: OSError(.|\n)*earlier .* unchanged"
    for step, error, told in ((2, full, unchanged), (3, interrupt, "")):
        others = CheckpointError if told else StateError
        content = _fail(error, lambda path: rank == 1 and path.parent.name.startswith(".step-"))
        with before_syncs(content):
            with pytest.raises(KeyboardInterrupt if rank == 1 and not told else others, match=told):
                checkpoint.save(root, model, step=step, keep_last=1)
            assert _names(root) == {"step-00000001"}
    newest = checkpoint.latest(root)
    assert newest is not None
    checkpoint.load(newest, model)
    checkpoint.save(root, model, step=4, keep_last=1)
    assert _names(root) == {"step-00000004"}


@on_ranks(2)
def test_latest_with_the_model_is_the_newest_checkpoint_that_all_nodes_have(tmp_path: Path) -> None:
    rank = dist.get_rank()
    root, model = tmp_path / f"node {rank}", _model()
    assert checkpoint.latest(root, model) is None
    paths = [checkpoint.save(root, model, step=step) for step in (1, 2, 3)]
    assert checkpoint.latest(root, model) == paths[2]
    dist.barrier()
    if rank == 1:
        change_manifest(paths[1], lambda content: content.update(identity=IDENTITY))
        # As after a crash of this node: the others have renamed theirs.
        paths[2].rename(root / f".{paths[2].name}-{IDENTITY}")
    dist.barrier()
    assert checkpoint.latest(root) == paths[1 if rank else 2]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert checkpoint.latest(root, model) == paths[0]
    assert [str(each.message) for each in told] == [
        f"{path} was skipped: not all ranks have it, of the same save" for path in paths[1:]
    ]
    with pytest.raises(CheckpointError, match=r"to checkpoint\.load.*folder of the run itself"):
        checkpoint.load(paths[0 if rank else 2], model)
    checkpoint.load(paths[0], model)


@on_ranks(2)
def test_the_folder_of_a_run_loads_its_newest_checkpoint_or_starts_anew(tmp_path: Path) -> None:
    root, model, default = tmp_path / "run", _model(), {"epoch": 0}
    assert checkpoint.resume(root, model, default=default) is default  # no folder
    dist.barrier()
    root.mkdir(exist_ok=True)
    (root / "log.txt").write_text("lr 0.1")
    (root / f".step-00000001-{IDENTITY}").mkdir(exist_ok=True)  # a save that was killed
    assert checkpoint.resume(root, model, default=None) is None
    with refused(CheckpointError, "No checkpoint was recognised", "only saves that did not finish"):
        checkpoint.load(root, model)
    for step in (1, 20, 3):
        checkpoint.save(root, model, extra=step, step=step)
    report = checkpoint.load(root, model)
    assert (report.path, report.extra) == (root / "step-00000020", 20)
    assert checkpoint.resume(root, model, default=default) == 20
    assert checkpoint.resume(root / "step-00000003", model, default=default) == 3
    with refused(UsageError, f"pass {root / 'step-00000003'}"):
        checkpoint.load(root / "step-00000003" / "rank-00000.safetensors", model)
    with refused(UsageError, "pass the path first"):
        checkpoint.save(model, root, step=4)
    checkpoint.save_safetensors(tmp_path / "exported", model)
    with torch.no_grad():
        expected = [parameter.clone() for parameter in model.parameters()]
        for parameter in model.parameters():
            parameter.zero_()
    assert checkpoint.resume(tmp_path / "exported", model, default=default) is None  # no extra
    assert all(map(torch.equal, model.parameters(), expected))


@on_ranks(2)
def test_a_run_with_a_folder_per_node_resumes_from_a_step_that_all_nodes_have(
    tmp_path: Path,
) -> None:
    """Otherwise it stops: starting anew would overwrite days of training."""
    rank, model = dist.get_rank(), _model()
    root = tmp_path / f"node {rank}"
    paths = [checkpoint.save(root, model, extra=step, step=step) for step in (1, 2, 3, 4)]
    for path in paths[1:] if rank == 1 else ():
        shutil.rmtree(path)
    dist.barrier()
    for newest in (lambda: checkpoint.load(root, model).path, lambda: latest(root, model)):
        with pytest.warns(UserWarning) as told:
            assert newest() == paths[0]
        assert [str(each.message) for each in told] == [
            f"{path} was skipped: not all ranks have it, of the same save" for path in paths[1:]
        ]
    dist.barrier()
    if rank == 1:
        shutil.rmtree(root)
    dist.barrier()
    with refused(CheckpointError, "no checkpoint in common", "rank 0: 1, 2, 3, 4; rank 1: none"):
        checkpoint.resume(root, model, default=0)


@on_ranks(1)
def test_damaged_manifests_are_skipped_with_one_sentence_unless_all_are(tmp_path: Path) -> None:
    model = _model()
    _, newest = [checkpoint.save(tmp_path, model, extra=step, step=step) for step in (1, 2)]
    (newest / "manifest.json").write_text("{x")
    calls: tuple[Callable[[], Any], ...] = (
        lambda: latest(tmp_path),
        lambda: latest(tmp_path, model),
        lambda: checkpoint.load(tmp_path, model),
        lambda: checkpoint.resume(tmp_path, model, default=0) == 1,
        lambda: checkpoint.files.verify(tmp_path),
    )
    for call in calls:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            assert call()
        [warning] = told
        assert warning.filename == __file__
        assert str(warning.message) == (
            f"{newest} was skipped: manifest.json is damaged, or has changed since it was saved: "
            "2 bytes without a valid one"
        )
    (tmp_path / "step-00000001" / "manifest.json").write_text("{}")
    with pytest.warns(UserWarning, match="was skipped"), refused(CheckpointError, "manifest.json"):
        checkpoint.resume(tmp_path, model, default=0)  # does not start anew


@on_ranks(1)
def test_a_path_that_is_no_checkpoint_is_told_what_to_pass(tmp_path: Path) -> None:
    root, model = tmp_path, _model()

    (root / "empty").mkdir()
    (root / "model.pt").write_bytes(b"")
    for path, text in (
        (checkpoint.latest(root / "empty"), "latest(folder) returns None"),
        (root / "model.pt", "model.pt is not a file of torch.save"),
        (root / "nowhere", "resume() starts without"),
        (root / "empty", "an empty directory"),
    ):
        with refused(FsdpCompatError, text):
            checkpoint.load(path, model)
    checkpoint.save(root / "run", model, step=1)
    optimizer = torch.optim.Adam(model.parameters())
    for path, other in ((root / "run", (_model(4),)), (root / "run", (model, optimizer))):
        with refused(CheckpointError, "checkpoint.load(path, ...)"):  # which has the arguments
            checkpoint.resume(path, *other, default=0)
    for call in (latest, partial(latest, model=model), checkpoint.files.inspect):
        with refused(UsageError, "without NUL characters"):
            call("a\0b")


@on_ranks(2)
def test_a_save_of_a_step_below_the_newest_one_says_what_latest_returns(tmp_path: Path) -> None:
    root, model = tmp_path, _model()
    checkpoint.save(root, model, step=5)
    for step, save in enumerate(SAVES, 3):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            save(root, model, step=step)
        if dist.get_rank() == 0:
            [warning] = told
            assert warning.filename == __file__
            text = str(warning.message)
            assert "holds step 5" in text and f"'{root}/step-{step:08d}' to load()" in text
        else:
            assert not told
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint.save(root, model, step=6)


@on_ranks(1)
def test_all_folders_that_a_save_makes_are_durable(tmp_path: Path) -> None:
    model = _model()
    for name, save in (("native", SAVES[0]), ("files", checkpoint.save_safetensors)):
        synced: set[Path] = set()
        with before_syncs(synced.add):
            keywords = {"step": 1} if name == "native" else {}
            save(tmp_path / name / "on" / "the way", model, **keywords)
        made = tmp_path / name
        assert {tmp_path, made, made / "on", made / "on" / "the way"} <= synced


@on_ranks(1)
def test_a_save_ends_well_or_with_a_checkpoint_error(tmp_path: Path) -> None:
    root, model, owned = tmp_path, _model(), []

    def close_the_owners_file(path: Path) -> None:
        """As something else in the process, such as os.closerange, may do."""
        for descriptor in () if owned else open_files(root):
            if ".owner-" in path_of(descriptor).name:
                owned.append(os.close(descriptor))

    with before_syncs(close_the_owners_file):
        path = checkpoint.save(root, model, step=1)
    assert owned and _names(root) == {path.name}

    def unsearchable(self: Path) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "exists", unsearchable)
        with pytest.raises(CheckpointError, match=r"PermissionError(.|\n)*nothing was written"):
            checkpoint.save(root, model, step=2)


@on_ranks(1)
def test_a_directory_that_is_removed_before_it_is_owned_is_made_again(tmp_path: Path) -> None:
    mkdir, lost = Path.mkdir, []

    def mkdir_and_lose(path: Path, *args: Any, **kwargs: Any) -> None:
        mkdir(path, *args, **kwargs)
        if not lost and path.name.startswith(".step-"):
            lost.append(os.rmdir(path))  # as another job's save does with what nobody owns

    model = _model()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "mkdir", mkdir_and_lose)
        path = checkpoint.save(tmp_path, model, step=1)
    assert lost and _names(tmp_path) == {path.name}
    checkpoint.load(path, model)


@on_ranks(1)
def test_a_file_system_that_cannot_sync_folders_takes_checkpoints(tmp_path: Path) -> None:
    model = _model()
    for number in (errno.EINVAL, errno.ENOTSUP, errno.EIO):
        root = tmp_path / str(number)
        with before_syncs(_fail(OSError(number, os.strerror(number)), Path.is_dir)):
            if number == errno.EIO:
                with refused(CheckpointError, os.strerror(number)):
                    checkpoint.save(root, model, step=1)
                continue
            checkpoint.save(root, model, step=1)
            checkpoint.save_safetensors(root / "weights", model)
        checkpoint.load(root, model)


@on_ranks(2)
def test_a_load_from_a_run_with_many_checkpoints_parses_few_manifests(tmp_path: Path) -> None:
    model, opened = _model(), []
    for step in range(8):
        checkpoint.save(tmp_path, model, step=step)
    original = os.open

    def noted(path: Any, *args: Any, **keywords: Any) -> int:
        opened.append(Path(path).name)
        return original(path, *args, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", noted)
        checkpoint.load(tmp_path, model)
    assert opened.count("manifest.json") == 1
