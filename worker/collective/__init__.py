"""Collectives between ranks: torch.distributed, or shared memory between CPU ranks of one host."""

from worker.collective.base import Collective, Solo
from worker.collective.process_group import ProcessGroupCollective, met

__all__ = ["Collective", "ProcessGroupCollective", "Solo", "met"]
