"""A run in the browser and in the terminal, live or recorded."""
