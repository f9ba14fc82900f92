"""Weights of linear layers at the width in which a quantized checkpoint stores them."""
