"""Benchmarks of the engine against other inference engines."""
