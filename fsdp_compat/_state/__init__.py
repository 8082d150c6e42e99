"""Everything that leaves a sharded model, or enters it, as a dictionary or as whole parameters."""
