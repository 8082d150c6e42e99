"""A checkpoint is merged within less resident memory than one of its tensors has.

It has 160 MB, and 4 GB with FSDP_COMPAT_TEST_ALL=1."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from fsdp_compat.checkpoint.files import convert, diff, inspect
from tests.support.programs import python
from tests.support.sampling import at_most
from tests.support.time_limit import limit_s

NUM_TENSORS, ROWS, COLUMNS = at_most(1, of_all=25), 6_400, 6_250  # 160 MB each
NBYTES = 4 * NUM_TENSORS * ROWS * COLUMNS
LIMIT_NBYTES = 130_000_000  # beside what the imports take
SEED_NBYTES = 64 << 20  # of random bytes, from which every tensor takes its values

PROGRAM = """
import sys
from pathlib import Path
import fsdp_compat.checkpoint.files
from fsdp_compat.__main__ import main

def status(key):
    (line,) = [line for line in open("/proc/self/status") if line.startswith(key)]
    return int(line.split()[1]) * 1024

Path("/proc/self/clear_refs").write_text("5")  # importing may have taken more than it keeps
before = status("VmRSS")
try:
    main(["convert", *sys.argv[1:]])
except SystemExit as end:
    assert not end.code, end.code
print(status("VmHWM") - before)
"""


def source(folder: Path) -> Path:
    """Write a native checkpoint of two ranks. No two tensors begin alike, and nothing is sparse."""
    seed = torch.randint(-(1 << 31), 1 << 31, (SEED_NBYTES // 4,), dtype=torch.int32)
    tensors = {}
    for number in range(NUM_TENSORS):
        # The rows overlap: each begins 4 KiB after the one before.
        rows = seed.view(torch.float32).as_strided((ROWS, COLUMNS), (1024, 1), 1024 * number)
        tensors[f"layers.{number}.weight"] = rows
    torch.save(tensors, folder / "seed.pt")
    return convert(folder / "seed.pt", folder / "source", to="native", world_size=2)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_checkpoint_is_merged_in_less_memory_than_a_tensor_has(tmp_path: Path) -> None:
    if os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize < 2.2 * NBYTES:
        pytest.skip(f"less than {2.2 * NBYTES / 1e9:.0f} GB on the disk")
    path, target = source(tmp_path), tmp_path / "merged.safetensors"
    found = inspect(path)
    assert (found.nbytes, len(found.tensors), found.world_size) == (NBYTES, NUM_TENSORS, 2)
    on_disk = sum(512 * file.stat().st_blocks for file in path.iterdir())
    assert on_disk >= NBYTES, "no holes"
    ran = python("-c", PROGRAM, path, target, timeout=limit_s(900))
    peak = int(ran.stdout.splitlines()[-1])
    assert peak <= LIMIT_NBYTES, f"{peak / 1e6:.0f} MB"
    assert diff(path, target).is_same
