"""What does the wire cost, and what do other ways of doing the same? See ``__main__``."""
