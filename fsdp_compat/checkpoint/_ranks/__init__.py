"""How the ranks of a save or a load agree, or all raise."""
