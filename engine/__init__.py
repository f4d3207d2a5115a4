"""Produces tokens: the worker process, its model code, KV cache, sampler and scheduler."""
