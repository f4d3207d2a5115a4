"""Benchmarks of Tidegate against its peers and against the machine's limits; run them as
modules."""
