"""Recurrent layers of models that mix them with attention: gated delta rule in torch."""
