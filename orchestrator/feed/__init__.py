"""Tasks in, batches out: what flows between the user's iterators, the run and the trainer."""
