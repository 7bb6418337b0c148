"""Models of proteins over a multiple sequence alignment (b s r c) and its pairs of residues (b i j c)."""
