"""Checkpoints that all ranks write and read together, on any number of ranks.

All of these calls but ``latest`` without a model need all ranks; ``files`` is for one process
without a model.

    extra = checkpoint.resume("runs/7", model, optimizer, default={"epoch": 0})
    for epoch in range(extra["epoch"], 10):
        ...
        checkpoint.save("runs/7", model, optimizer, {"epoch": epoch + 1}, step=epoch, keep_last=2)

- ``save``: write a checkpoint into the folder of a run; ``async_save``: while training continues
- ``resume``: load the newest checkpoint of a run, if there is one
- ``load``: load one checkpoint, also of other formats; returns what was loaded, and what was left
- ``latest``: the newest complete checkpoint in the folder of a run
- ``save_safetensors``, ``load_safetensors``: weights, as Hugging Face has them
- ``iter_full_state_dict``: whole tensors, one unit at a time, for any other format
- ``files``: inspect, verify, compare, convert and list checkpoints of any format"""

from .._state.model_state import iter_full_state_dict
from . import files
from ._folder.directory import latest
from ._load import LoadReport, load, load_safetensors, resume
from ._safetensors_save import save_safetensors
from ._save import AsyncSave, async_save, save

__all__ = [
    "AsyncSave",
    "LoadReport",
    "async_save",
    "files",
    "iter_full_state_dict",
    "latest",
    "load",
    "load_safetensors",
    "resume",
    "save",
    "save_safetensors",
]
