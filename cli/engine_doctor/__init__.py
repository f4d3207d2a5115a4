"""`tidegate doctor`: examines an external engine and reports what is wrong for RL training."""
