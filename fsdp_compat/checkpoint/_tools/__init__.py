"""Checkpoints of any format, in one process: what they hold, and from one format to another."""
