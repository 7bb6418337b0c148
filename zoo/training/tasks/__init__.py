"""The tasks: data, batches, and the loss of the model on them."""
