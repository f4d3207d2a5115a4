"""Weight versions on their way to engines, pauses and sleep."""
