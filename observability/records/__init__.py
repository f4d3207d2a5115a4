"""What a run leaves on disk: its recorder, and the readers of its files."""
