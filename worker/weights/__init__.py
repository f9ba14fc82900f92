"""Stored weights: read, sharded and packed, from safetensors, GGUF and quantized checkpoints; their cache."""
