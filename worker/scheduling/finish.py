"""The end of a sequence, decided by the leader alone after each token."""

from __future__ import annotations

from control.messages import FinishReason
from control.text.text import Decode, TextStream
from worker.scheduling.sequence import Sequence


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
