"""What one step does, as a scheduler plans it and a GenerateStep command carries it."""

from __future__ import annotations

from dataclasses import dataclass, field

from control.messages import GenerateStep, Prefix, Scored
from worker.scheduling.sequence import Sequence


@dataclass(slots=True)
class StepPlan:
    """The fields of GenerateStep, and the order in which the engine samples."""

    sequences: list[int] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    offset: list[int] = field(default_factory=list)
    sample: list[bool] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    paused: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    prefixes: list[Prefix] = field(default_factory=list)
    scored: list[Scored] = field(default_factory=list)
    continuing: list[int] = field(default_factory=list)
    """Sids in ascending order that decode by themselves: sampled in the last step, without a row here."""

    @property
    def sampled(self) -> list[int]:
        """Sids in the order in which the engine samples them: the continuing ones, then the rows that say so."""
        return self.continuing + [sid for sid, wanted in zip(self.sequences, self.sample, strict=True) if wanted]

    @property
    def fed(self) -> dict[int, int]:
        """How many positions the step adds to each sequence's KV."""
        rows = zip(self.sequences, self.tokens, strict=True)
        return dict.fromkeys(self.continuing, 1) | {sid: len(tokens) for sid, tokens in rows}

    def command(self, model_id: str, *, epoch: int, seq: int, repeat: bool = False) -> GenerateStep:
        """The plan as the ranks get it."""
        return GenerateStep(
            epoch=epoch,
            seq=seq,
            model_id=model_id,
            sequences=self.sequences,
            tokens=self.tokens,
            offset=self.offset,
            sample=self.sample,
            left=self.left,
            paused=self.paused,
            kept=self.kept,
            prefixes=self.prefixes,
            scored=self.scored,
            repeat=repeat,
        )

    def feed(self, sequence: Sequence, count: int) -> None:
        """Add a row with the next `count` tokens of the sequence; the one that reaches its end is sampled."""
        start, stop = sequence.cached, sequence.cached + count
        self.sequences.append(sequence.sid)
        self.tokens.append(sequence.context(start, stop))
        self.offset.append(start)
        self.sample.append(stop == sequence.length)
        if positions := sequence.to_score(start, stop):
            self.scored.append(Scored(sequence.sid, positions.start, positions.stop))
