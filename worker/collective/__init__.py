"""Collectives: sums between ranks in shared memory on one host, else by torch.distributed; imports no torch itself."""

from worker.collective.base import Collective, Solo

__all__ = ["Collective", "Solo"]
