"""What a running or finished run looks like: metrics, dashboard, terminal, logs."""
