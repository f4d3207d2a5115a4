"""From logits to tokens: options, processors, grammars, stop strings."""
