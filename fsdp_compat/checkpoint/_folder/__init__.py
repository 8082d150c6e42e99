"""The folder of a run: its checkpoints, how they appear, which is the newest, what is removed."""
