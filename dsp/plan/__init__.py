"""Plans: a forward without data is traced, the planner solves the trace, and a run follows the resulting script."""
