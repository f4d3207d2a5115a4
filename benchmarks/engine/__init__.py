"""Benchmarks of the engine against other inference engines; ``python -m benchmarks.engine`` runs
them."""
