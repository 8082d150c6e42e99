"""State dicts and optimizer state, exchanged with torch, other front ends and other ranks."""
