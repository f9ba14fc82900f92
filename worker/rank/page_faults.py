"""Page faults of this process: evidence that mapped weights are read. A thread that waits for a disk has none."""

from __future__ import annotations

import resource

FAULTS_OF_PROGRESS = 4
"""One fault maps 4 KiB to some MiB of a file, as the system likes. A thread that only waits has one now and then."""


def faults_of_other_threads() -> int:
    """Page faults of the process so far, without those of the calling thread."""
    whole, own = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_THREAD)
    return whole.ru_majflt + whole.ru_minflt - own.ru_majflt - own.ru_minflt


def progress_of_load() -> int:
    """A number that changes while other threads of this process read weights or fill memory."""
    return faults_of_other_threads() // FAULTS_OF_PROGRESS
