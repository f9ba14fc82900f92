"""Weights as stored numbers: tensors read, quantized, dequantized, cut among ranks and packed; the cache of packed
weights."""
