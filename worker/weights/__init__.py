"""Weights as stored numbers: tensors read, quantized, dequantized, cut among ranks and packed; the cache of packed
weights.

A quantized matrix is a `StoredMatrix` from the checkpoint to the packed memory: kind, codes, and scales and zeros where
they are not among the codes. A plain matrix is a `Tensor`. `ModelFiles` reads headers once for gate, fingerprint, kinds
and checkpoint. A rank reads them itself at its load, because an older header would give wrong numbers without an error.
A class for each format with the same methods was rejected: every caller asked for the class all the same.
"""
