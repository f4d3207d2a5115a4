"""Tasks of the user's iterators, and the trainer's batches of tensors.

The trainer's handles make batches, which need torch; the scheduler reads tasks.
"""
