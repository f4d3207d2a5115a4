"""Weight versions and LoRA adapters: staging beside the live weights, and the swap."""
