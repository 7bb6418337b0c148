"""Proteins as training data: structures and alignments from files, records of proteins, and training examples."""
