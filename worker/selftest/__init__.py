"""Trials of kernels, graph capture and collectives beside plain torch, in child processes; the choice that follows."""
