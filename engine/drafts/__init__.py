"""Sources of draft tokens for speculative decoding: n-gram lookup, earlier samples, a draft model.

``--speculative-method`` selects the source. The draft model has a step runner of its own.
"""
