"""Trainer in another process or on another host, as one process or as data-parallel ranks.

``tidegate.connect`` is the trainer's end, ``tidegate.listen`` the run's; both use ZeroMQ, with the
messages of ``transport/trainer_messages.py``.
"""
