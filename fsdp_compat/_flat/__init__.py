"""How the flat front end builds its units."""
