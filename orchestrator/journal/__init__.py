"""What survives the death of a run's process, and how a run goes on from it."""
