"""Communication: which rows of a tensor lie on which rank, and what brings them to another one.

Read layout first, then collectives and moves; observers and gradients say how backward follows. Formats, routes and
pieces of an exchange are in wire, formats, node_routes, routes and pending; balanced_rows and halo are for dealt rows
and rows of neighbours; hardware is how long all that takes.
"""
