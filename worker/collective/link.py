"""The group of a model's modules, which changes with each epoch."""

from __future__ import annotations

from worker.collective import Collective


class Link:
    """The group that a model's modules talk through; exchanged as one when a new epoch joins a new group."""

    def __init__(self, collective: Collective) -> None:
        self.collective = collective
