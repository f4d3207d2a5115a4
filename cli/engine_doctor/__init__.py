"""Examination of an external engine over HTTP: measurements, and findings about RL training.

The reference log-probs need transformers.
"""
