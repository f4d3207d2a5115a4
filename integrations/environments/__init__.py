"""Adapters of environment packages (Gymnasium, OpenEnv, …) to Tidegate's environment interface.

An environment pool's worker processes import the adapter that the user names. Each adapter needs
its environment package.
"""
