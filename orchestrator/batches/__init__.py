"""Tasks of the user's iterators, and the trainer's batches of tensors."""
