"""Model directories: configs, tensors, and the forward pass."""
