"""Benchmarks of Tidegate against peers and the machine's limits, each run as ``python -m
benchmarks.NAME``."""
