"""A forward as a record of nodes, planned and run: stages, their offers, and operations that run on replicated tensors.

docs/core.md says in which order to read the files.
"""
