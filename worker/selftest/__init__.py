"""Trials of kernels, graph capture and collectives beside plain torch, and the verdicts by which kernels are chosen."""
