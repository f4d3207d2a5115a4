"""Publishing of weights: reading state dicts, and control of engines' updates.

Used by the trainer's handles (publish) and the scheduler's :class:`EngineSide` (updates, pauses,
sleep). The weight channels are in ``transport/weight_channels/``. Decisions are
``core/weight_control.py``'s.
"""
