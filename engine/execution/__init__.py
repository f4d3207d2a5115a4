"""Forward passes: the step runner, the served model, the transformers fallback, sleep."""
