"""What this rank holds: the model's parts, the optimizers', and the snapshot of both for a save."""
