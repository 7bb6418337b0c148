"""Guards of a parallel model, each an observer of its calls: agreement of ranks, traffic, threads, errors, warnings."""
