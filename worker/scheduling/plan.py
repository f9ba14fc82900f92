"""The plan of one step, made by the scheduler and carried by a GenerateStep command."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

import msgspec

from control.commands import BatchChange, StepImage, StepRow
from control.messages import PromptImage
from worker.scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True)
class NeededImage:
    """An image of which a step's rows hold a part, and its index among the images of its request."""

    rid: str
    index: int
    image: PromptImage


@dataclass(slots=True)
class StepPlan:
    """The ranks' part of a step, and the sequences that decode without a word to them."""

    change: BatchChange = field(default_factory=BatchChange)
    continuing: list[int] = field(default_factory=list)
    """Sids in ascending order that decode by themselves: sampled in the last step, without a row here."""
    sequences: dict[int, Sequence] = field(default_factory=dict[int, Sequence], repr=False)
    """All sequences of the step, by sid."""
    guesses: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    """Tokens that follow those of a sequence's row and have not been sampled, by sid."""
    images: list[StepImage] = field(default_factory=list[StepImage])
    """The images of the sequences that begin, which the ranks have to know."""

    @property
    def sampled(self) -> list[int]:
        """Sids in the order in which the engine samples them: the continuing ones, then the rows that say so."""
        return self.continuing + [row.sid for row in self.change.rows if row.sample]

    @property
    def logits_rows(self) -> dict[int, range]:
        """The rows of logits of each sequence of `sampled`, by sid: one, and one after each guess."""
        rows: dict[int, range] = {}
        start = 0
        for sid in self.sampled:
            rows[sid] = range(start, start + 1 + len(self.guesses.get(sid, ())))
            start = rows[sid].stop
        return rows

    @property
    def to_sample(self) -> list[Sequence]:
        """The sequences of `sampled`; one with guesses is followed by itself as it is after each of them."""
        sequences: list[Sequence] = []
        for sid in self.sampled:
            sequences.append(self.sequences[sid])
            for token in self.guesses.get(sid, ()):
                sequences.append(sequences[-1].followed_by(token))
        return sequences

    @property
    def fed(self) -> dict[int, int]:
        """How many positions the step adds to each sequence's KV, if all guesses are right."""
        return dict.fromkeys(self.continuing, 1) | {row.sid: len(row.tokens) for row in self.change.rows}

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the rows that don't decode by themselves, nor guess."""
        return sum(len(row.tokens) for row in self.change.rows if not row.guesses)

    def continue_decode(self, sequence: Sequence) -> None:
        """Let the sequence decode by itself."""
        self.continuing.append(sequence.sid)
        self.sequences[sequence.sid] = sequence

    def begin(self, sequence: Sequence) -> None:
        """The sequence begins under its sid."""
        sid = sequence.sid
        if sequence.rid:
            self.change.requests[sid] = sequence.rid
        self.images += [StepImage(sid, i.start, i.count, i.height, i.width, i.digest) for i in sequence.images]

    def needed_images(self) -> list[NeededImage]:
        """The images of which the step's rows hold a part."""
        needed: list[NeededImage] = []
        for row in self.change.rows:
            sequence = self.sequences[row.sid]
            stop = row.offset + len(row.tokens)
            for index, image in enumerate(sequence.images):
                if image.start < stop and row.offset < image.start + image.count:
                    needed.append(NeededImage(sequence.rid, index, image))
        return needed

    def mark_snapshots(self) -> None:
        """Let the ranks keep a copy of the recurrent state behind each row that ends where its sequence has one."""
        rows = self.change.rows
        for index, row in enumerate(rows):
            if row.offset + len(row.tokens) in self.sequences[row.sid].snapshots:
                rows[index] = msgspec.structs.replace(row, snapshot=True)

    def feed(self, sequence: Sequence, count: int, guesses: Tokens[int] = ()) -> None:
        """Add a row with the next `count` tokens of the sequence; the one that reaches its end is sampled, and may be
        followed by guesses."""
        start = sequence.cached
        stop = start + count
        scored = sequence.to_score(start, stop)
        self.sequences[sequence.sid] = sequence
        if guesses:
            self.guesses[sequence.sid] = list(guesses)
        self.change.rows.append(
            StepRow(
                sequence.sid,
                [*sequence.context(start, stop), *guesses],
                start,
                stop == sequence.length,
                (scored.start, scored.stop) if scored else None,
                len(guesses),
                sequence.second,
            )
        )
