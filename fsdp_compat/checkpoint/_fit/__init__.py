"""What a load takes of an archive: where it lies, by which names, and what the optimizer gets."""
