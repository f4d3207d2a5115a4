"""Sequences, KV blocks, the running set and the step scheduler."""
