"""Forward passes on the CPU: step runner, transformers fallback, and sleep of their memory."""
