"""Tensors of safetensors files that are quantized, or stored together, by the names of plain ones."""
