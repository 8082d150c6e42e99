"""Checkpoints in any format: saved, loaded, converted, compared; also after crashes and damage."""
