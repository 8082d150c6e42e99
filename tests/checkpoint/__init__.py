"""Checkpoints of any format: saving, loading, converting, crashes, damage."""
