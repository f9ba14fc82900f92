"""Weights of GGUF files as tensors or blocks."""
