"""The package as a whole: its structure, names, imports and distributions."""
