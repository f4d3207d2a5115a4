"""Memory that runs out, is given back, and is had again."""
