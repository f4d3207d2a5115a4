"""Continuous-batching scheduler: sequences, KV blocks, prefix cache, preemption and pauses.

Pure: no tensors, no sockets.
"""
