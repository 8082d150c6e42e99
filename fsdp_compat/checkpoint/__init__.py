"""Checkpoints on disk: written by all ranks at once, and read by any number of them.

path = save("runs/7", model, optimizer, {"epoch": 3}, step=1200, keep_last=2)
extra = load(latest("runs/7"), model, optimizer)
"""

from .._state.optim_state_dict import check_optimizer
from ._directory import latest
from ._full import iter_full_state_dict
from ._load import load
from ._safetensors_load import load_safetensors
from ._safetensors_save import save_safetensors
from ._save import AsyncSave, async_save, save

__all__ = [
    "AsyncSave",
    "async_save",
    "check_optimizer",
    "iter_full_state_dict",
    "latest",
    "load",
    "load_safetensors",
    "save",
    "save_safetensors",
]
