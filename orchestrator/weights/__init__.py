"""Weights and adapters: what a version is made of, and how it gets to every engine."""
