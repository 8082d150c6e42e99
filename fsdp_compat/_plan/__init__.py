"""What a training step takes, from one simulated rank: ``memory`` follows storages, ``simulation``
makes the meta device answer as a GPU would, ``step`` runs the step, ``plan`` is public, ``command``
is ``fsdp-compat plan``."""

from .plan import Plan, plan

__all__ = ["Plan", "plan"]
