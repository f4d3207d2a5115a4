"""Versions of weights and adapters: staged beside those that serve, and swapped in."""
