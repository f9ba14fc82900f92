"""Logits to tokens: logits processors, grammars, log probabilities."""
