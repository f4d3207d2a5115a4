"""Examines an engine before anybody trains on what it says: `tidegate doctor`."""
