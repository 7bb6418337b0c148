"""Operations between stages on shards: rules as offers, and sources, the long tensors that no operand brings."""
