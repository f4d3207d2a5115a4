"""Tensor parallelism: one engine as several processes, each with a part of every layer.

Used by the worker with more than one rank. Ranks talk by pipes (commands) and gloo (all-reduce).
"""
