"""`tidegate doctor`: examines an external engine over HTTP, and reports what is wrong for RL
training.

Called by ``cli/doctor.py``. Depends on transformers, for the reference log-probs.
"""
