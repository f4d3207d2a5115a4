"""Example tasks, models and trainers on top of Tidegate, to run and to copy from. Each is run by
``python -m examples.NAME``; they use the public API, torch and transformers."""
