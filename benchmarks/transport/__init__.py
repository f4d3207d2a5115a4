"""Benchmarks of the wire: messages, tokens and weights, against other transports; ``python -m
benchmarks.transport`` runs them."""
