"""Adapters of environment packages to Tidegate's environment interface."""
