"""Sampling and scoring: options, logits processors, grammars, stop strings, log-probs."""
