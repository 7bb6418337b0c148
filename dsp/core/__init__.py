"""A forward as a record of nodes, planned and run: stages, their offers, and operations that run on replicated tensors.

Read in this order: record, carrier, keys, copies, run, recording, offers, decide, parallel; then watch, hooks and
checkpoints, which let code around a forward see what it expects. docs/core.md goes with it.
"""
