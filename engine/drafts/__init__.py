"""Sources of draft tokens for speculative decoding."""
