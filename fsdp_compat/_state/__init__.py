"""State of sharded models: state dicts, optimizer state and whole parameters, out and in."""
