"""Everything that changes torch for the whole process."""
