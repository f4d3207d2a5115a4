"""Publishing of weights: reading state dicts, and control of engines' updates.

The weight channels are in ``transport/weight_channels/``. ``core/weight_control.py`` makes the
decisions.
"""
