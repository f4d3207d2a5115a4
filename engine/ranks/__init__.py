"""Tensor parallelism: one engine as several processes, each with a part of every layer.

Ranks exchange commands over pipes, and tensors with gloo (all-reduce).
"""
