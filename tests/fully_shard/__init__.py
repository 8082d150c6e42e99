"""fully_shard has the results, methods and errors of torch's FSDP2."""
