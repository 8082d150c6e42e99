"""Parts of torch that compare classes of FSDP work with ours after ``install()``."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp_compat
from fsdp_compat._engine.on_import import PatchOnImport
from fsdp_compat._engine.patches import around_functions
from tests.support.parity import assert_close
from tests.support.ranks import run_ranks

DIM, MICROBATCHES = 8, 4


def _stages() -> list[nn.Sequential]:
    torch.manual_seed(0)
    return [nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(2))) for _ in range(2)]


def _pipelines() -> None:
    """Two stages, each sharded over two ranks; the gradients are the unsharded model's."""
    fsdp_compat.install()
    try:
        from torch.distributed.fsdp import FSDPModule, fully_shard
        from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "data"))
        stage, replica = mesh.get_coordinate() or ()
        plain = nn.Sequential(*_stages())
        model = _stages()[stage]
        for layer in model:
            fully_shard(layer, mesh=mesh["data"])
        fully_shard(model, mesh=mesh["data"])
        assert isinstance(model, FSDPModule)
        schedule = ScheduleGPipe(
            PipelineStage(model, stage, 2, torch.device("cpu"), group=mesh.get_group("pipeline")),
            MICROBATCHES,
            loss_fn=lambda output, target: (output - target).pow(2).mean(),
        )
        batches = [torch.randn(8, DIM) for _ in range(2)]
        for step in range(2):
            if stage == 0:
                schedule.step(batches[replica])
            else:
                schedule.step(target=torch.zeros(8, DIM))
            plain.zero_grad()
            for batch in batches:
                (plain(batch).pow(2).mean() / 2).backward()
            expected = dict(plain[stage].named_parameters())
            for name, p in model.named_parameters():
                assert p.grad is not None
                wanted = expected[name].grad
                assert wanted is not None
                assert_close(p.grad.full_tensor(), wanted, f"gradient of {name} in step {step}")
                p.grad = None
    finally:
        fsdp_compat.uninstall()


def test_pipelining_trains_sharded_stages() -> None:
    run_ranks(4, _pipelines)


def test_several_changes_of_a_module_are_made_when_it_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "changed_twice.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    made: list[str] = []

    def change(name: str) -> PatchOnImport:
        return PatchOnImport("changed_twice", lambda _: made.append(name) or [])  # type: ignore[func-returns-value]

    changes = change("one"), change("other")
    for each in changes:
        each.patch()
    importlib.import_module("changed_twice")
    for each in changes:
        each.undo()
    assert sorted(made) == ["one", "other"]


def test_functions_are_replaced_where_they_were_imported_and_no_module_is_loaded_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "replaced.py").write_text("def double(x): return 2 * x\n")
    (tmp_path / "importer.py").write_text("from replaced import double as twice\n")
    (tmp_path / "not_needed.py").write_text("raise ValueError\n")
    monkeypatch.syspath_prepend(tmp_path)
    replaced, importer = map(importlib.import_module, ("replaced", "importer"))
    spec = importlib.util.find_spec("not_needed")
    assert spec is not None and spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    lazy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lazy)
    monkeypatch.setitem(sys.modules, "not_needed", lazy)
    before = replaced.double
    (undo,) = around_functions(replaced, {"double": lambda original, x: original(x) + 1})
    assert replaced.double is importer.twice is not before
    assert (importer.twice(3), importer.twice.__name__) == (7, "double")
    later = importlib.reload(importer)
    undo()
    assert replaced.double is later.twice is before
