"""Memory and time of a step, predicted without a GPU."""
