"""What a training step takes, from one simulated rank: ``memory`` follows storages, ``clock``
estimates times, ``simulation`` makes the meta device answer as a GPU would, ``step`` runs the step,
``plan`` and ``suggestion`` are public, ``command`` is ``fsdp-compat plan``."""

from .plan import Plan, plan
from .suggestion import Suggestion, suggest_policy

__all__ = ["Plan", "Suggestion", "plan", "suggest_policy"]
