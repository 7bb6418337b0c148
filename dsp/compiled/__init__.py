"""A forward as one graph of local operations and collectives, recorded from a planned forward, for `compile=`."""
