"""Runs written ahead: a command holds only what changes, so those of a greedy run are known before its tokens."""

from __future__ import annotations

from dataclasses import dataclass

from control.commands import BatchChange, GenerateStep, Prefix, StepRow


@dataclass(frozen=True)
class Job:
    """One sequence: joins at step `start`, prefills `chunk` tokens a step, leaves after `new` tokens.

    It begins with the first `shared` positions of `donor`, and with its very memory if it `takes_over`.
    """

    sid: int
    prompt: list[int]
    chunk: int
    new: int
    start: int = 0
    donor: int = 0
    shared: int = 0
    takes_over: bool = False
    stays: bool = False
    """True if its KV is kept when it has ended."""
    uncut: tuple[range, ...] = ()
    """Positions of images inside which no row ends."""
    scored: bool = False
    """True if each position of its prompt that has a token after it is scored."""
    states: tuple[int, ...] = ()
    """Positions of its prompt behind which a copy of its recurrent state is kept."""


def write(jobs: list[Job]) -> list[GenerateStep]:
    """The commands of a run in which the jobs join and leave at their own steps."""
    fed, sampled, finished = {job.sid: job.shared for job in jobs}, dict.fromkeys((job.sid for job in jobs), 0), 0
    steps: list[GenerateStep] = []
    copies = {job.sid: job.states for job in jobs}
    leaving: list[int] = []
    resting: list[int] = []
    while finished < len(jobs) or leaving or resting:
        rows: list[StepRow] = []
        prefixes: list[Prefix] = []
        now, leaving = leaving, []
        kept, resting = resting, []
        for job in jobs:
            if job.start > len(steps) or sampled[job.sid] == job.new:
                continue
            offset = fed[job.sid]
            if offset == job.shared and job.donor:
                prefixes.append(Prefix(job.sid, job.donor, job.shared, bool(copies[job.donor]) and job.takes_over))
                if prefixes[-1].snapshots:
                    copies[job.sid] = copies[job.donor]
                now += [job.donor] if job.takes_over else []
            if offset < len(job.prompt):
                part = job.prompt[offset : _stop(job, offset)]
                fed[job.sid] += len(part)
                stop = min(fed[job.sid], len(job.prompt) - 1)
                scored = (offset, stop) if job.scored and stop > offset else None
                copied = fed[job.sid] in job.states
                rows.append(StepRow(job.sid, part, offset, fed[job.sid] == len(job.prompt), scored, snapshot=copied))
            sampled[job.sid] += fed[job.sid] == len(job.prompt)
            if sampled[job.sid] == job.new:
                (resting if job.stays else leaving).append(job.sid)
                finished += 1
        change = BatchChange(rows=rows, left=now, kept=kept, prefixes=prefixes)
        steps.append(GenerateStep(epoch=1, seq=len(steps) + 1, model_id="tiny", change=change))
    return steps


def _stop(job: Job, offset: int) -> int:
    """The end of a row from `offset` on, as a scheduler plans it."""
    stop = offset + job.chunk
    for image in job.uncut:
        if image.start < stop < image.stop:
            stop = image.start if image.start > offset else image.stop
    return min((place for place in job.states if offset < place < stop), default=stop)
