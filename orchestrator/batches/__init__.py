"""Tasks in, tensors out."""
