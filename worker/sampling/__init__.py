"""Logits to tokens: samplers, filters, penalties, grammars, log probabilities."""
