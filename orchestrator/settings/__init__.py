"""Settings of a run, checked before any process starts."""
