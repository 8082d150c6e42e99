"""Which rank holds which elements: integers only."""
