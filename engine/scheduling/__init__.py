"""Continuous-batching scheduler: sequences, KV blocks, prefix cache, preemption and pauses.

The engine loop calls it. Pure: no tensors, no sockets. Depends on numpy, the message types of
``transport/`` and ``engine/sampling``'s options.
"""
