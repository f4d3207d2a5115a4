"""Journal of a run's events, and resume and replay from it."""
