"""Checkpoints of other versions, of torch and of this package, hold what they held when they were
written. ``corpus/make.py`` wrote them, and noted the values before it saved them."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat import StateDictType, checkpoint
from fsdp_compat.checkpoint import files
from fsdp_compat.errors import CheckpointError
from tests.checkpoint.corpus import content
from tests.checkpoint.corpus.make import CORPUS, TRUTH, ours
from tests.support.cases import about
from tests.support.checkpoints import refused
from tests.support.odd_model import whole
from tests.support.ranks import on_ranks
from tests.support.sampling import TEST_ALL

NOTED = json.loads(TRUTH.read_text(encoding="utf-8"))
ENTRIES: dict[str, dict[str, Any]] = NOTED["entries"]


def noted(path: str) -> dict[str, Any]:
    """Return the "model", "optimizer" and "groups" of a checkpoint as they were noted."""
    values = NOTED["contents"][ENTRIES[path]["content"]]
    if ENTRIES[path]["has_optimizer"]:
        return values
    return {"model": values["model"], "optimizer": {}, "groups": []}


def test_every_file_of_the_corpus_is_in_its_table() -> None:
    found = {path.relative_to(CORPUS).parts[:2] for path in CORPUS.glob("*/*/**/*")}
    found |= {path.relative_to(CORPUS).parts for path in CORPUS.glob("*/*.pt")}
    assert {"/".join(parts) for parts in found if parts[0] != "__pycache__"} == set(ENTRIES)


@pytest.mark.filterwarnings("ignore:not written to")  # what belongs to one rank
@pytest.mark.parametrize("path", ENTRIES)
def test_a_reader_finds_what_was_saved(tmp_path: Path, path: str) -> None:
    entry, expected = ENTRIES[path], noted(path)
    shapes = tmp_path / "shapes.pt" if entry["needs_shapes"] else None
    torch.save(content.Tiny().state_dict(), tmp_path / "shapes.pt")
    assert files.verify(CORPUS / path, shapes=shapes).is_intact
    assert files.inspect(CORPUS / path, shapes=shapes).step == entry["step"]
    whole = torch.load(files.convert(CORPUS / path, tmp_path / "whole.pt", shapes=shapes))
    extra = {key: value for key, value in whole.items() if key not in ("model", "optimizer")}
    if "model" not in whole:
        whole, extra = {"model": whole}, {}
    optimizer = whole.get("optimizer", {"state": {}, "param_groups": []})
    model = content.facts_of(whole["model"])
    if not entry["has_ties"]:
        model |= {alias: model[name] for alias, name in content.TIES.items()}
    assert model == expected["model"]
    assert content.facts_of(optimizer["state"]) == expected["optimizer"]
    assert content.facts_of(extra) == entry["extra"]
    assert _groups(optimizer["param_groups"]) == _groups(expected["groups"])


def _groups(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = content.facts_of_groups(groups)
    return [{**group, "params": sorted(group["params"])} for group in found]


def _require_loaded(path: str, kind: str) -> None:
    """Require that an entry gives a model of a kind the noted values."""
    model, _ = ours(kind)
    entry, expected = ENTRIES[path], noted(path)
    optimizer = content.OPTIMIZERS[entry["content"]](model)
    is_rank_local = entry["content"] == "rank-local"
    if is_rank_local and dist.get_world_size() != 2:
        with refused(CheckpointError, "belongs to one rank's part"):
            checkpoint.load(CORPUS / path, model, optimizer)
    if is_rank_local and (kind not in path or dist.get_world_size() != 2):
        return  # on as many ranks, other kinds may have the same parts
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    given = (model, optimizer) if expected["groups"] else (model,)
    extra = checkpoint.load(CORPUS / path, *given).extra
    if (CORPUS / path / "manifest.json").exists() and entry["extra"]:
        is_alike = len(list((CORPUS / path).glob("rank-*"))) == dist.get_world_size()
        rank = dist.get_rank() if is_alike else 0
        assert content.facts_of(extra) == {**entry["extra"], "rank": rank}
    else:
        assert content.facts_of(extra or {}) == entry["extra"]
    loaded = content.facts_of(dict(checkpoint.iter_full_state_dict(model)))
    assert loaded == expected["model"]
    if is_rank_local:
        for group in optimizer.param_groups:
            assert group["lr"] == expected["groups"][0]["lr"]
            states = [optimizer.state[parameter] for parameter in group["params"]]
            assert any(states)
            for state in filter(None, states):
                assert torch.equal(state["codes"], content.codes_of(dist.get_rank()))
    elif expected["groups"]:
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            saved = FSDP.optim_state_dict(model, optimizer)
        assert content.facts_of(whole(saved["state"])) == expected["optimizer"]
        assert _groups(saved["param_groups"]) == _groups(expected["groups"])


KINDS = ["flat", "original", "rows", "columns"]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
@on_ranks("ranks")
def test_every_checkpoint_loads_into_a_model_that_is_sharded_in_any_way(
    kind: str, ranks: int
) -> None:
    warnings.simplefilter("ignore")
    for number, path in enumerate(ENTRIES):
        # Each entry into one kind of each front end, on one number of ranks, or into each on each.
        is_chosen = (number + 4 * KINDS.index(kind) + ranks) % 8 == 0 or "rank-local" in path
        with about(path):
            if TEST_ALL or is_chosen:
                _require_loaded(path, kind)


@on_ranks(2)
def test_the_first_rank_warns_of_what_a_load_does_not_read() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        checkpoint.load(CORPUS / "clients/accelerate-full", ours("rows")[0])
    found = [str(each.message) for each in caught if "not read from" in str(each.message)]
    assert len(found) == (1 if dist.get_rank() == 0 else 0)
    assert all("random_states_0.pkl: state of one process" in message for message in found)
