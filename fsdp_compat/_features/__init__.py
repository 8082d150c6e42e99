"""What users do with a sharded model beside training it: descriptions, averages, norms of single
gradients, and optimizers of whole parameters. How their state is saved is up to `_state`."""
