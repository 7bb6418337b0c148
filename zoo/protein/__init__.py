"""Models of proteins over a multiple sequence alignment (b s r c) and its pairs of residues (b i j c).

Letters of shapes in all models of proteins:

    b        batch
    s        rows of the alignment
    r i j k  residues: of a protein, of a pair, of a triangle; k also numbers of a residue or features of a pair
    c d      channels, hidden channels
    h e      heads, channels of a head
    n        rows, each with its own attention; templates
    v        classes
    l        iterations of the structure module
    a p x y  atoms, points, axes of space
"""
