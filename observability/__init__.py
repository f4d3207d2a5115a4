"""Recorder, reports, traces, metrics, audit and dashboard of a run."""
