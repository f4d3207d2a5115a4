"""Guesses of the next tokens, for a step to verify several at once."""
