"""Client libraries run on fsdp_compat, and get DDP's results."""
