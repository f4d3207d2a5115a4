"""The engines of a run: which there are, what they are told, and which of them pause or sleep."""
