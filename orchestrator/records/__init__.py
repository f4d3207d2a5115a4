"""What a run leaves behind, and what can be learned from it: reports, traces, audits."""
