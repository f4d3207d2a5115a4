"""Forecast of a run's throughput and staleness, by closed forms or by simulation.

``tidegate plan`` calls it. Closed forms are ``policies/predictions.py``'s.
"""
