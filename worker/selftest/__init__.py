"""Trials of kernels, graph capture and collectives beside plain torch, and the verdicts that switch them off.

Verdicts are below the kernels, which ask for them. Each trial is a module beside its kernel and is named by its path,
which no import contract checks; tests load each.
"""
