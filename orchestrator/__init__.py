"""Runs rollouts: decides which start, where turns run, and which batches and weights come when."""
