"""What does a rollout cost the orchestrator, and what does it cost others? See ``__main__``."""
