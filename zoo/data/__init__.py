"""Data sets. Each is in a file of its own and imports what it needs to read when it is built, not before."""
