"""check: is this model, with these stages, exact in parallel? Forward, every gradient, and every stage by slices.

What is found wrong is a problem; what was not looked at is said, too.
"""
