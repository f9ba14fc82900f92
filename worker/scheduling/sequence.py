"""The objects of scheduling: a running generation, which is a choice of a request with its tokens and its slot in the
scheduler, and the plan of a step, which a GenerateStep command carries."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple

import msgspec

from control.commands import BatchChange, StepImage, StepRow
from control.messages import FinishReason, PromptImage, Sampling
from control.text.text_stream import Decode, TextStream
from worker.scheduling.constraint import Constraint
from worker.scheduling.lookup import ContextLookup, Prediction


class Flow(NamedTuple):
    """The sequences that share a turn, in a queue as in a leader: a tenant's of one priority class."""

    tenant: str = ""
    priority: str = "normal"


SOLE = Flow()
"""The flow of a sequence that shares with no other."""


class SequenceState(Enum):
    """NEW: not added yet. WAITING: holds no KV. PREFILL: its context is being fed. DECODE: one token a step."""

    NEW = "new"
    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    ENDED = "ended"


MOVES: dict[SequenceState, frozenset[SequenceState]] = {
    SequenceState.NEW: frozenset({SequenceState.WAITING}),
    SequenceState.WAITING: frozenset({SequenceState.PREFILL, SequenceState.ENDED}),
    SequenceState.PREFILL: frozenset({SequenceState.DECODE, SequenceState.WAITING, SequenceState.ENDED}),
    SequenceState.DECODE: frozenset({SequenceState.WAITING, SequenceState.ENDED}),
    SequenceState.ENDED: frozenset(),
}
"""The allowed changes of state; a change back to WAITING is a preemption."""


@dataclass(eq=False, slots=True, kw_only=True)
class Sequence:
    """A generation. With `output` present it continues one that was adopted or preempted.

    `sid` names it in the commands to the ranks. The scheduler assigns it, and a new one after each preemption, so that
    a rank never confuses it with KV that it was told to forget. It changes only while a step is planned.
    """

    rid: str
    choice: int
    prompt: list[int]
    sampling: Sampling
    salt: str = ""
    """Only sequences with the same salt begin with each other's KV."""
    images: list[PromptImage] = field(default_factory=list[PromptImage])
    flow: Flow = SOLE
    """The flow in whose share of slots and memory it counts."""
    output: list[int] = field(default_factory=list)
    sid: int = 0
    state: SequenceState = SequenceState.NEW
    arrival: int = 0
    """Order of arrival within this epoch; kept through preemptions."""
    cached: int = 0
    """Positions whose KV the ranks hold after the last applied step."""
    cached_prompt_tokens: int = 0
    """Positions of `cached` that it got from another sequence at its last admission."""
    blocks: list[int] = field(default_factory=list[int])
    """Hashes of the whole blocks of its context; its prefix cache makes and reads them."""
    snapshots: list[int] = field(default_factory=list[int])
    """Positions at which the ranks keep a copy of its recurrent state."""
    planned_snapshots: list[int] = field(default_factory=list[int])
    """Positions at which they are to keep one, in ascending order."""
    window_from: int = 0
    """The first position that layers with windows have of it at least: it may have begun as a copy of a part."""
    end_known: bool = True
    """False if it was dropped while a step ran with it, or ended before the last guess that was right: the ranks'
    recurrent state is not the one at `cached`."""
    preempted: bool = False
    """True if it was preempted in this epoch."""
    admitted: int = 0
    """The scheduler's count of the step in which it got its slot."""
    last_step: int = 0
    """The scheduler's count of the step that sampled it last."""
    text: TextStream | None = None
    """Its text so far, only where stop strings must be looked for."""
    scored: int = 0
    """Tokens of its prompt that have been told with their log probabilities, where these are wanted."""
    constraint: Constraint | None = None
    """The state of its grammar, if it has one."""
    lookup: ContextLookup | None = None
    """Finds guesses in its context, once it decodes."""
    prediction: Prediction | None = None
    """The tokens that its output may have; the choices of a request share it."""
    second: int = 0
    """The place in the prompt where the second text of a pair begins, 0 for a single text."""
    guessed: tuple[int, ...] = ()
    """Tokens after `output` that have not been sampled. The scheduler's sequences have none, see `followed_by`."""

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def longest(self) -> int:
        """KV positions that it can come to need; the last token of all is never fed."""
        return len(self.prompt) + self.most_tokens - 1

    @property
    def most_tokens(self) -> int:
        """The most tokens that are sampled for it; one if none is wanted, which no client gets."""
        return max(1, self.sampling.max_tokens)

    @property
    def unscored(self) -> bool:
        """True if log probabilities of its prompt are wanted and have not been emitted."""
        return self.sampling.prompt_logprobs is not None and self.scored < len(self.prompt)

    @property
    def reusable(self) -> int:
        """The number of positions that can come from another sequence. The logits of the later ones are needed: those
        of a position score or sample the token after it."""
        return max(0, self.scored - 1) if self.unscored else self.length - 1

    def to_score(self, start: int, stop: int) -> range:
        """Those of the positions [start, stop) whose logits tell of a token that is still wanted."""
        return range(max(start, self.reusable), min(stop, len(self.prompt) - 1)) if self.unscored else range(0)

    def context(self, start: int, stop: int) -> list[int]:
        """Tokens [start, stop) of prompt and output."""
        border = len(self.prompt)
        return self.prompt[start:stop] + self.output[max(0, start - border) : max(0, stop - border)]

    @property
    def position(self) -> int:
        """The place in the output of the token that comes next."""
        return len(self.output) + len(self.guessed)

    def beside_images(self, count: int) -> int:
        """The length of a row of about `count` tokens that does not end inside an image: it ends before that, or with
        it where nothing is before it."""
        stop = self.cached + count
        for image in self.images:
            if image.start < stop < image.start + image.count:
                stop = image.start if image.start > self.cached else image.start + image.count
        return stop - self.cached

    def followed_by(self, token: int) -> Sequence:
        """The sequence as it would be after one more token, to sample from; not for the scheduler. It shares `output`,
        whatever its length is."""
        constraint = None if self.constraint is None else self.constraint.followed_by(token)
        return replace(self, guessed=(*self.guessed, token), constraint=constraint)

    def identity(self, start: int, stop: int) -> list[int]:
        """As `context`, with a number below zero in the place of each placeholder of an image, which equal images alone
        share: equal identities have equal keys and values."""
        tokens = self.context(start, stop)
        for image in self.images:
            begin = max(start, image.start)
            end = min(stop, image.start + image.count)
            if begin < end:
                tokens[begin - start : end - start] = [~int(image.digest, 16)] * (end - begin)
        return tokens

    def move(self, state: SequenceState) -> None:
        """Change the state. Raises ValueError for a move that MOVES does not have."""
        if state not in MOVES[self.state]:
            raise ValueError(f"sequence {self.sid} of request {self.rid} can't go from {self.state} to {state}")
        self.state = state


class Finisher:
    """Decides ends; keeps the text of those sequences that have stop strings, and detokenises no others."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode

    def adopt(self, sequence: Sequence) -> None:
        """Take up a sequence; what it has put out already is read again, as it may have begun a stop string."""
        sampling = sequence.sampling
        sequence.text = TextStream(self._decode, sampling.stop, sampling.min_tokens) if sampling.stop else None
        if sequence.text is not None:
            for token in sequence.output:
                sequence.text.push(token)

    def decide(self, sequence: Sequence, token: int) -> tuple[FinishReason, str | None] | None:
        """The reason and cause of the end that `token`, now last of `sequence.output`, brings; None if it continues.

        The cause is "token" for a stop id, which stays part of the output; the stop string, which readers cut off;
        "grammar" if the text is complete; None for the length. Stop ids and strings count only after `min_tokens`
        tokens.
        """
        sampling = sequence.sampling
        if token in sampling.stop_ids and len(sequence.output) > sampling.min_tokens:
            return "stop", "token"
        if sequence.text is not None:
            _, stop = sequence.text.push(token)
            if stop is not None:
                return "stop", stop
        if sequence.constraint is not None:
            sequence.constraint.advance(token)
            if sequence.constraint.complete:
                return "stop", "grammar"
        if len(sequence.output) >= sampling.max_tokens:
            return "length", None
        return None


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
        """The number of positions that the step adds to each sequence's KV, if all guesses are right."""
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
