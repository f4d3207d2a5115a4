"""Sampling and scoring: options, logit processors, grammars, stop strings, log-probs."""
