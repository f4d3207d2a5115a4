"""Oracle of simulated runs: ground truth, the model of tokens, invariants, coverage marks."""
