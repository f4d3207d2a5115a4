"""Client API of a run: serve, connect, batches, publish; local and remote."""
