"""Loaded by ``import torch`` itself in an environment that build.py made, as its entry point of the
group torch.backends. Copied there under the name fakecuda_load."""

from __future__ import annotations

import importlib


def load() -> None:
    import torch

    importlib.import_module("fakecuda_ops")
    # Of operations with several implementations, use the one that the CPU has as well.
    torch.backends.cudnn.enabled = False
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
