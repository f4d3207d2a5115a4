"""Efficiency and staleness of the scheduling policies, in virtual time; ``python -m
benchmarks.scheduling`` prints them."""
