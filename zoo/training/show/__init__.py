"""What is shown of a model: samples during a run, what it has to beat, and what infer.py makes with it."""
