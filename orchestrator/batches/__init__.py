"""Tasks of the user's iterators, and the trainer's batches of tensors.

Used by the scheduler (tasks) and the trainer's handles (batches). Batches need torch. Both read the
core's groups and rollouts.
"""
