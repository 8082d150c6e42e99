"""How the two front ends turn modules and arguments into units."""
