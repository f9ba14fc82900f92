"""Logits to tokens in torch, where it computes the logits."""
