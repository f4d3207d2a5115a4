"""Pure decisions of a run and its state: groups, rollouts, turns, versions, ledger. No I/O."""
