"""Layouts of parameters, behind the interface that they share."""
