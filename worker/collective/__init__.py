"""Collectives between ranks: shared memory between CPU ranks of one host, else torch.distributed; imports no torch
itself."""

from worker.collective.base import Collective, Solo

__all__ = ["Collective", "Solo"]
