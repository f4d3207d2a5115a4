"""Benchmarks of the orchestrator's CPU and memory cost per rollout, against its peers; ``python -m
benchmarks.orchestrator`` runs them."""
