"""Checkpoints on disk, written by all ranks at once and read by any number of them.

    path = save("runs/7", model, optimizer, {"epoch": 3}, step=1200, keep_last=2)
    extra = load(latest("runs/7"), model, optimizer)

Formats, each with its own entry point; a new format is a new pair of files like those of
safetensors:

- native, model and optimizer (``save``, ``load``): a directory with a file per rank and a manifest
- safetensors, weights for other tools: ``_safetensors_save``, ``_safetensors_load``, and
  ``_safetensors_parts``, which both use
- whole tensors, for any other format: ``_full`` (``iter_full_state_dict``)
- any checkpoint, in one process, without a model: ``inspect``, ``verify``, ``diff``, ``convert``,
  and the command ``fsdp-compat``, all in ``_tools``

Native, saving:

- ``_save``: the calls ``save`` and ``async_save``; ``_background``: saves that a thread writes
- ``_save_job``: plan (check, agree), write (each rank its file), commit (manifest, rename)
- ``_snapshot``: what this rank's file holds; ``_directory``: from hidden directory to checkpoint

Native, loading:

- ``_load``: the call; read, agree, act
- ``_load_plan``, ``_load_optimizer``, ``_load_settings``: what this rank reads, and what it
  changes with it; ``_report``: what ``strict=False`` leaves
- ``_part_source``: where this rank's part of a parameter lies in the files

The bytes of the native format:

- ``_manifest``: ``manifest.json``, the layout of all shards and the checksums of all files
- ``_rank_files``: writing and reading the ranks' files; ``_head``: the text in each
- ``_values``: Python values as JSON, without pickle

Used by all formats:

- ``_header``: the header of a safetensors file; ``_blocks``: bytes in blocks with checksums
- ``_texts``: JSON from untrusted files; ``_named_groups``: the parameter groups to save
- ``_ranks``: agreement of all ranks; ``_mailbox``, ``_processes``: how they communicate, and how a
  rank that has ended is noticed
- ``_optimizers``: whether the ranks' optimizers match; ``_progress``: the progress bar
"""

from .._state.optim_calls import check_optimizer
from ._directory import latest
from ._full import iter_full_state_dict
from ._load import load
from ._report import LoadReport
from ._safetensors_load import load_safetensors
from ._safetensors_save import save_safetensors
from ._save import AsyncSave, async_save, save
from ._tools.convert import convert
from ._tools.difference import Difference, TensorDifference, ValueDifference, diff
from ._tools.inspection import Inspection, Part, TensorFacts, inspect
from ._tools.verification import Problem, TensorCheck, Verification, verify

__all__ = [
    "AsyncSave",
    "Difference",
    "Inspection",
    "LoadReport",
    "Part",
    "Problem",
    "TensorCheck",
    "TensorDifference",
    "TensorFacts",
    "ValueDifference",
    "Verification",
    "async_save",
    "check_optimizer",
    "convert",
    "diff",
    "inspect",
    "iter_full_state_dict",
    "latest",
    "load",
    "load_safetensors",
    "save",
    "save_safetensors",
    "verify",
]
