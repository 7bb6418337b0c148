"""Declarations: stages in their notation, bound to modules and to the arguments of their calls."""
