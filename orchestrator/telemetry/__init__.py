"""Measurements of a run: statistics, forecast, watchdog, and the interface of recorders.

Used by the scheduler and the trainer's handle; ``observability/`` exports what is measured here. It
reads the core's ledger and rollouts.
"""
