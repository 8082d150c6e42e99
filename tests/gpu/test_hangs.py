"""Programs on NCCL whose ranks part: each rank gets an error or a warning, and none hangs."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat import StateDictType
from fsdp_compat._comm.board import board
from fsdp_compat.wrap import ModuleWrapPolicy
from tests.support import fakecuda
from tests.support.devices import NCCL
from tests.support.errors import message_of
from tests.support.parity import seeded
from tests.support.programs import Launcher
from tests.support.time_limit import limit_s

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not fakecuda.is_used(), reason=fakecuda.WHY)]
WARM_UP, NUM_STEPS, USUAL = 2, 5, [0, 1, 2, 3]
LATE = r"rank 0 has not begun .* '0', which .* 3 wait[\s\S]*rank 0: is at .*test_hangs.py:\d+ in "
# ranks, those that part, the order of their blocks, if hosts run ahead of devices, error, warning
CASES = {
    "skips": (2, [1], [0, 2, 3], False, "rank 1 skipped the .* of unit '1'", ""),
    "swaps": (4, [2], [1, 0, 2, 3], True, "rank 2 began the .*'0' where .* began the .*'1'", ""),
    "evaluates": (2, [1], USUAL, False, "rank 1 began the .*'0' where rank 0 began the .*", ""),
    "raises": (4, [0, 3], [0, 4], False, "ended with IndexError: index 4 is out of range", ""),
    "killed": (4, [0], USUAL, True, "rank 0 was killed", ""),
    "stopped": (2, [0], USUAL, False, "rank 0 was killed", "rank 0 .*stopped"),
    "late": (4, [0], USUAL, False, "", LATE),
}


class Blocks(nn.ModuleList):
    order, ahead = USUAL, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in self.order:
            x = self[i](x).relu() + x
        return x.pow(2).mean()


def built() -> Blocks:
    return seeded(lambda: Blocks(nn.Linear(8, 8, bias=i % 2 == 0) for i in USUAL))


def train(model: Any, device: str, losses: list[float], steps: int) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        (loss := model(torch.ones(2, 8, device=device))).backward()
        losses += [] if model.ahead else [loss.item()]
        optimizer.step()
    torch.ones(1, device=device).item()
    return optimizer


def program(case: str, folder: Path, rank: int) -> None:
    ranks, parting, order, ahead, *_ = CASES[case]
    torch.cuda.set_device(rank)
    dist.init_process_group(NCCL, f"file://{folder}/store", rank=rank, world_size=ranks)
    board.PATIENCE, board.LOOK_S = 1.0, 0.2
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    warnings, losses, failed = list[str](), list[float](), ()

    def on_warning(record: logging.LogRecord) -> bool:
        warnings.append(record.getMessage())
        (folder / f"warned-{rank}").touch()
        if case == "stopped" and rank == 1:
            os.kill(int((folder / "pid-0").read_text()), signal.SIGKILL)
        return True

    def shards() -> list[Any]:
        with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
            torch.save(model.state_dict(), folder / f"{rank}.pt")
        state = torch.load(folder / f"{rank}.pt", weights_only=False)
        return [value.local_tensor().tolist() for value in state.values()]

    logging.getLogger("fsdp_compat.waits").addFilter(on_warning)
    policy, x = ModuleWrapPolicy({nn.Linear}), torch.ones(2, 8)
    model = FSDP(built(), auto_wrap_policy=policy, device_id=torch.device("cuda", rank))
    optimizer, before = train(model, "cuda", losses, WARM_UP), shards()
    dist.barrier()
    time.sleep(0.5)  # what was posted before is withdrawn
    started, model.module.ahead = time.monotonic(), ahead
    try:
        if rank in parting:
            model.module.order = order
            if case in ("killed", "stopped"):
                os.kill(os.getpid(), signal.SIGKILL if case == "killed" else signal.SIGSTOP)
            with torch.no_grad():
                case != "evaluates" or model(x.cuda())
            while case == "late" and len([*folder.glob("warned-*")]) < ranks:
                time.sleep(0.1)
        train(model, "cuda", losses, NUM_STEPS - WARM_UP)
    except RuntimeError as error:
        after_s, uses = time.monotonic() - started, [lambda: model(x.cuda()), optimizer.step]
        failed = str(error), after_s, [*map(message_of, uses)], shards() == before
    print(json.dumps([losses, warnings, failed]))


@pytest.fixture(scope="module")
def launcher() -> Launcher:
    return Launcher("fsdp_compat", "pytest", FSDP_COMPAT_WARN_AFTER="3")  # none uses CUDA


@pytest.mark.parametrize("case", CASES)
def test_ranks_part(launcher: Launcher, case: str, tmp_path: Path) -> None:
    ranks, parting, _, ahead, error, warning = CASES[case]
    code = f"import sys, tests.gpu.test_hangs as t; t.program({case!r}, t.Path(sys.argv[1]), "
    programs = f"{code}int(sys.argv[2]))", [[tmp_path, rank] for rank in range(ranks)]
    # until a late rank has come, or the values would be wrong on fakecuda
    ended = launcher.run(*programs, tmp_path, FAKECUDA_NCCL_HANGS="0.5" if error else "60")
    train(built(), "cpu", expected := [], WARM_UP if error else NUM_STEPS)
    for rank, each in enumerate(ended):
        if rank in parting and case in ("raises", "killed", "stopped"):
            assert each.code == (1 if case == "raises" else -signal.SIGKILL)
            assert ("IndexError" in each.err) == (case == "raises") and "StateErr" not in each.err
            continue
        assert each.code == 0, each.err
        losses, warnings, failed = json.loads(each.out)
        assert losses == pytest.approx(expected)
        assert re.search(warning or "^$", "".join(warnings[:1])), warnings
        if error:
            message, after_s, later, is_intact = failed
            assert re.search(error, message) and after_s < limit_s(12 if warning else 5), message
            assert all("has failed before" in message for message in later)
            assert is_intact != ahead == ("do not save" in message)
