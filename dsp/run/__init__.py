"""The run: hooks on stages, glue between them, by the script of a plan."""
