"""Measurements of a run: statistics, forecast, watchdog, and the interface of recorders.

``observability/`` exports what is measured here.
"""
