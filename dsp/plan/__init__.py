"""Plans: a forward without data is traced, the planner solves what comes out, and a run follows the script of it."""
