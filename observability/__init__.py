"""Recorder, reports, traces, metrics, audit and dashboard of a run.

``tidegate.runs`` attaches recorder and dashboard to a run; ``tidegate report``, ``audit``,
``compare`` and ``trace`` read the files that the recorder left. pyarrow, matplotlib and Starlette
are imported when used.
"""
