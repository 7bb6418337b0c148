"""check: is this model, with these stages, exact in parallel? Forward, every gradient, and every stage by slices.

The report lists what is wrong as problems, and also names what was not compared.
"""
