"""The plan for readers: passes over the nodes of a planned record. They print, and never change a run."""
