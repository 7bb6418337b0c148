"""The ranks of a cluster: how many of them to use."""
