"""Programs written for torch's FSDP or DDP run unchanged, or are migrated."""
