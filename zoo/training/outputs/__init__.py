"""The pictures of a model: samples during a run, its baselines, and what infer.py makes with it."""
