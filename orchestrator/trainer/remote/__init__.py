"""Trainer in another process or on another host, as one process or as data-parallel ranks.

``tidegate.connect`` opens the trainer's end, ``tidegate.listen`` the run's end. Both use ZeroMQ
and the messages of ``transport/trainer_messages.py``.
"""
