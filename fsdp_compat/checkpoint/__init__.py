"""Checkpoints on disk, written by all ranks at once and read by any number of them.

    path = save("runs/7", model, optimizer, {"epoch": 3}, step=1200, keep_last=2)
    extra = resume("runs/7", model, optimizer, default={"epoch": 0})  # the newest; or start anew

Native, saving (model and optimizer; a directory with a file per rank and a manifest):

- ``_save``: the calls ``save`` and ``async_save``: plan (check, agree), write (each rank its file),
  commit (manifest, rename); ``_background``: saves that a thread writes
- ``_snapshot``: what this rank's file holds
- ``_manifest``: ``manifest.json``, the layout of all shards and the checksums of all files, and
  the text in each file; ``_values``: Python values as JSON, without pickle

Loading, from any format:

- ``_load``: the calls ``load``, ``resume`` and ``load_safetensors``; read, agree, act; what
  ``strict=False`` leaves; ``_newest``: the newest checkpoint of a run; ``_load_optimizer``: the
  states and settings of an optimizer
- ``_source``: a checkpoint under the names of the model, and what this rank reads of it

Other formats:

- safetensors, weights for other tools: ``_safetensors_save``
- whole tensors, for any other format: ``_full`` (``iter_full_state_dict``)
- any checkpoint, in one process, without a model: ``inspect``, ``verify``, ``diff``, ``convert``,
  and the command ``fsdp-compat``, all in ``_tools``, which reads and writes the formats for ranks
  too

Used by all:

- ``_publishing``: from a hidden directory to a result; ``_directory``: a run's folder
- ``_header``: the header of a safetensors file; ``_blocks``: files with a checksum of each block
- ``_texts``: JSON from untrusted files; ``_arguments``: what arguments may be
- ``_named_groups``: the parameter groups of a model, and what this rank holds of each tensor
- ``_ranks``: agreement of all ranks; ``_mailbox``, ``_processes``: how they communicate, and how a
  rank that has ended is noticed
- ``_optimizers``: whether the ranks' optimizers match; ``_progress``: the progress bar
"""

from ._directory import latest
from ._full import iter_full_state_dict
from ._load import LoadReport, load, load_safetensors, resume
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
    "convert",
    "diff",
    "inspect",
    "iter_full_state_dict",
    "latest",
    "load",
    "load_safetensors",
    "resume",
    "save",
    "save_safetensors",
    "verify",
]
