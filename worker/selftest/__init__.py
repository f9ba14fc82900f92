"""Trials of kernels, graph capture and collectives beside plain torch, and the verdicts that switch them off."""
