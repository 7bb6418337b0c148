"""What runs train on: data, batches, and the loss of the model on them."""
