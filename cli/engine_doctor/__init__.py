"""`tidegate doctor`: examines an external engine and reports what it gets wrong."""
