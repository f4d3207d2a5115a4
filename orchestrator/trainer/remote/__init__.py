"""A trainer in another process or on another host, as one process or as ranks."""
