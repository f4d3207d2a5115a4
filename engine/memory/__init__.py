"""Out-of-memory handling, and release of host memory for sleep."""
