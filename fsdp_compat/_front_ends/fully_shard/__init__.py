"""How the per-parameter front end turns modules and arguments into units."""
