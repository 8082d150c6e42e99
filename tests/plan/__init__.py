"""Memory and traffic of a step, predicted without a GPU."""
