"""Whole simulated runs, from their start to their end or first failure, and sweeps of them."""
