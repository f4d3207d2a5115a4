"""Sampling and scoring: options, logits processors, grammars, stop strings, log-probs.

The engine's scheduler reads a turn's options; the runners sample and score.
"""
