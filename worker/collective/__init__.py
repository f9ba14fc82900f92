"""The collectives of a rank group behind one small interface, so that a model never knows what carries them."""

from worker.collective.base import Collective, Solo
from worker.collective.process_group import ProcessGroupCollective, met

__all__ = ["Collective", "ProcessGroupCollective", "Solo", "met"]
