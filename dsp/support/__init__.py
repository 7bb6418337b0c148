"""Facts about torch, Python and text, without a word of sharding: private parts of torch, tensors in nested
values, the state that a forward may change, source lines, tables."""
