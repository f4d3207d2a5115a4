"""Data that a seed draws: the scenario of a run, and its injected faults."""
