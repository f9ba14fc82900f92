"""Linear layers for CPUs whose weights are packed once, at load: float32 for its fastest product, 16 bits, 8 bits."""
