"""Examination of an external engine over HTTP: measurements, and findings about RL training.

``tidegate doctor`` calls it. Depends on transformers, for the reference log-probs.
"""
