"""The leader's part of scoring prompts: from the logits of their positions to tokens with log probabilities."""

from __future__ import annotations

import structlog
import torch

from control.messages import PromptToken
from worker.sampling.scoring import score
from worker.scheduling.sequence import Sequence

log = structlog.get_logger()


class StepScorer:
    """What one step tells of those prompts whose tokens are wanted with their log probabilities."""

    def __init__(self, sequences: list[Sequence]) -> None:
        self._sequences = {sequence.sid: sequence for sequence in sequences if sequence.unscored}
        self._found: dict[Sequence, dict[int, PromptToken]] = {one: {} for one in self._sequences.values()}
        """By place in the prompt; a forward that is run again only finds them once more."""
        self.failed: dict[Sequence, str] = {}
        """Why a prompt could not be scored."""

    def __call__(self, logits: torch.Tensor, places: list[tuple[int, int]]) -> None:
        """Score the tokens that follow `places` (sid, position), from their logits [len(places), vocabulary].

        Never raises: a fault is its sequences' alone, and the group goes on.
        """
        sequences = [self._sequences[sid] for sid, _ in places]
        try:
            self._score(logits, sequences, [position for _, position in places])
        except Exception:
            log.exception("could not score prompts", rids=sorted({sequence.rid for sequence in sequences}))
            self.failed |= dict.fromkeys(sequences, "its prompt could not be scored; the server's log has the cause")

    def _score(self, logits: torch.Tensor, sequences: list[Sequence], positions: list[int]) -> None:
        wanted = [sequence.sampling.prompt_logprobs or 0 for sequence in sequences]
        targets = [sequence.prompt[position + 1] for sequence, position in zip(sequences, positions, strict=True)]
        tokens = score(logits, targets, max(wanted))
        for sequence, position, most, token in zip(sequences, positions, wanted, tokens, strict=True):
            if token is None:
                self.failed[sequence] = f"the model's logits are not finite after token {position} of the prompt"
            else:
                # A neighbour may want more of the most likely ones.
                self._found[sequence][position + 1] = PromptToken(
                    token.token, token.logprob, token.rank, token.top[:most]
                )

    @property
    def scored(self) -> dict[Sequence, list[PromptToken]]:
        """The next tokens of the prompts that did not fail. The first token of all comes with the second one."""
        return {
            sequence: [*_first(sequence), *(token for _, token in sorted(found.items()))]
            for sequence, found in self._found.items()
            if sequence not in self.failed
        }


def _first(sequence: Sequence) -> list[PromptToken]:
    """Nothing comes before it that could tell of it."""
    return [PromptToken(sequence.prompt[0])] if sequence.scored == 0 else []
