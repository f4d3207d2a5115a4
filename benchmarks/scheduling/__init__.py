"""Efficiency and staleness of the scheduling policies, in virtual time."""
