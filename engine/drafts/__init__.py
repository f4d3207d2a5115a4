"""Sources of draft tokens for speculative decoding: n-gram lookup, earlier samples, a draft model.

The worker opens the source that ``--speculative-method`` names; the engine's scheduler calls it.
Lookups use numpy; the draft model runs on a step runner of its own.
"""
