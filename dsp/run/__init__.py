"""The run of a parallel model: hooks on stages and operations between them, by the script of a plan."""
