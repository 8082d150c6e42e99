"""How FullyShardedDataParallel builds and handles its units."""
