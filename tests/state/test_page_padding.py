"""Shards with and without padding to whole pages: every checkpoint loads into the other kind."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import StateDictType as TorchType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as TorchWrapPolicy

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat import StateDictType, checkpoint
from fsdp_compat.wrap import ModuleWrapPolicy
from tests.engine.test_mapped_shards import WIDTH, Wide, wide_batch
from tests.support.models import Block
from tests.support.odd_model import assert_identical, cloned
from tests.support.parity import make_pair
from tests.support.ranks import on_ranks, run_ranks
from tests.support.same_host import MAPPED


def saved(folder: str) -> tuple[str, dict[str, Tensor]]:
    """Train, save a native checkpoint, and return its path and the full state."""
    pair = make_pair(Wide, (Block,))
    pair.step(batch=wide_batch)
    path = checkpoint.save(Path(folder), pair.model, pair.optim, step=1)
    return str(path), cloned(dict(pair.model.state_dict()))


def loaded(folder: str, full: dict[str, Tensor]) -> None:
    """Load both into models that are cut otherwise."""
    for load in (
        lambda pair: checkpoint.load(Path(folder), pair.model, pair.optim),
        lambda pair: pair.model.load_state_dict(full),
    ):
        pair = make_pair(Wide, (Block,))
        load(pair)
        assert_identical(pair.model.state_dict(), full)
        pair.model(torch.ones(2, WIDTH)).sum().backward()


@pytest.mark.parametrize("ranks", [(2, 3), (3, 2)])
def test_checkpoints_move_between_layouts_with_and_without_pages(
    ranks: tuple[int, int], tmp_path: Path
) -> None:
    for number, (first, second) in enumerate(((MAPPED, {}), ({}, MAPPED))):
        found = run_ranks(ranks[0], saved, str(tmp_path / str(number)), environment=first)
        run_ranks(ranks[1], loaded, *found[0], environment=second)


def local_states(library: str) -> dict[str, Any]:
    """The local state dict and the full one, of torch's FSDP1 or of ours."""
    torch.manual_seed(0)
    if library == "torch":
        policy: Any = TorchWrapPolicy({Block})
        theirs = TorchFSDP(Wide(), auto_wrap_policy=policy, device_id=torch.device("cpu"))
        with TorchFSDP.state_dict_type(theirs, TorchType.LOCAL_STATE_DICT):
            return theirs.state_dict()
    model = FSDP(Wide(), auto_wrap_policy=ModuleWrapPolicy({Block}))
    with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        return cloned(dict(model.state_dict()))


@pytest.mark.parametrize("ranks", [2, 3])
@on_ranks("ranks", environment=MAPPED)
def test_local_state_dicts_with_other_padding_load(ranks: int) -> None:
    """Cut without pages, by torch and by us, into a model that is cut in pages."""
    torch.manual_seed(0)
    full = Wide().state_dict()
    for library in ("torch", "ours"):
        with mock.patch.dict(os.environ, FSDP_COMPAT_MAP_FROM=str(1 << 40)):
            local = local_states(library)
        model = FSDP(Wide(), auto_wrap_policy=ModuleWrapPolicy({Block}))
        with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
            model.load_state_dict(local)
        assert_identical(model.state_dict(), full)
