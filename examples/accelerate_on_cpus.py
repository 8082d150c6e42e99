"""Let Accelerate, and the Transformers Trainer, use FSDP on CPUs, where they would use DDP.

Call ``allow_fsdp()`` before the first Accelerator or Trainer is made. On GPUs it is not needed."""

from __future__ import annotations

from typing import Any


def allow_fsdp() -> None:
    import torch
    from accelerate import state
    from accelerate.utils import DistributedType

    inner = state.AcceleratorState.__init__

    def init(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        inner(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is None or self.distributed_type is not DistributedType.MULTI_CPU:
            return
        self.distributed_type = DistributedType.FSDP
        if self._mixed_precision != "no":
            fsdp_plugin.set_mixed_precision(self._mixed_precision)
        self.fsdp_plugin = fsdp_plugin
        self.device = torch.device("cpu")  # torch's own FSDP1 refuses "cpu:0"
        state.PartialState._shared_state["distributed_type"] = self.distributed_type

    state.AcceleratorState.__init__ = init
