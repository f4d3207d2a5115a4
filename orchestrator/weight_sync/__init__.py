"""Weight versions on their way to the engines; pauses and sleep."""
