"""Dashboard of a run in the browser and in the terminal, live or from its files."""
