"""Tensor parallelism: one engine as several processes, each with a part of every layer.

Used by the worker with more than one rank. Ranks exchange commands by pipes, and tensors by gloo
(all-reduce).
"""
