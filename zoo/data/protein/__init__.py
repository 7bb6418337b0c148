"""Proteins as training data: structures and alignments from files, records of them, and what a model is trained on."""
