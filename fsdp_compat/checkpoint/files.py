"""Checkpoint files of any format, in one process: without a process group, a GPU or the model.

    from fsdp_compat.checkpoint import files

    run = files.list_checkpoints("runs/7")  # the checkpoints of a run; which one is the latest?
    files.inspect(run.latest).tensors  # what one holds: names, dtypes, shapes, ranks and files
    files.verify(run.latest).problems  # whether it is complete and undamaged
    files.diff(run.latest, "exported", weights=True, rtol=1e-2).different  # what has changed
    files.convert(run.latest, "model.pt", weights=True)  # another format, names, dtypes, a part

Formats: native checkpoints of ``checkpoint.save``, torch.distributed.checkpoint, torch.save (one
file, or one per rank), safetensors, and directories of Accelerate, Lightning and the Trainer. The
commands of ``fsdp-compat`` have the same arguments. What is returned has ``as_json()``."""

from ._tools.convert import convert
from ._tools.difference import diff
from ._tools.inspection import inspect
from ._tools.run_listing import list_checkpoints
from ._tools.verification import verify

__all__ = ["convert", "diff", "inspect", "list_checkpoints", "verify"]
