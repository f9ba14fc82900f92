"""Verdicts on kernels: which were tried on this kind of device, and which are switched off; no torch."""
