"""Layers: tensor-parallel, fused and quantized."""
