"""Forecast of a run's throughput and staleness, by closed forms or by simulation.

Called by ``tidegate plan``. Closed forms are ``policies/predictions.py``'s.
"""
