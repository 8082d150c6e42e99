"""State dicts and optimizer state, exchanged with torch and with other ranks."""
