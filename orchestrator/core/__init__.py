"""What happens next in a run, and what has happened: pure decisions, no I/O."""
