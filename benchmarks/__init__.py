"""Benchmarks of Tidegate against peers and the machine's limits; run them as modules."""
