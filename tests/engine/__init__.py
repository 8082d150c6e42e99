"""What is in memory, and what is communicated, at each moment of a step."""
