"""The layouts behind the seam."""
