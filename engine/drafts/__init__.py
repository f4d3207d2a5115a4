"""Sources of draft tokens for speculative decoding: n-gram lookup, earlier samples, a draft model.

The worker opens the source that ``--speculative-method`` names; the engine's scheduler calls it.
"""
