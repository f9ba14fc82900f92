"""The requests that a leader runs on its group: what each step of the scheduler gave them."""

from __future__ import annotations

import structlog

from control.errors import RequestError
from control.messages import PromptToken
from worker.engine.images import EngineImages
from worker.engine.scoring import PromptScores
from worker.leader.crash_isolation import CrashIsolation
from worker.leader.request import RunningRequest, prompt_entries
from worker.leader.running_requests import RunningRequests
from worker.rank.counters import Counters
from worker.sampling.grammars import Grammars
from worker.sampling.sampler import StepTokens
from worker.scheduling.scheduler import Scheduler, StepPlan
from worker.scheduling.sequence import Finisher, Sequence

log = structlog.get_logger()


class ScheduledRequests(RunningRequests):
    """Running requests whose sequences are with a scheduler."""

    def __init__(
        self,
        scheduler: Scheduler,
        finisher: Finisher,
        grammars: Grammars,
        isolation: CrashIsolation,
        images: EngineImages | None = None,
        fingerprint: str | None = None,
        counters: Counters | None = None,
    ) -> None:
        """`images`: those of the leader's rank; None where the model takes text only."""
        super().__init__(scheduler, finisher, grammars, isolation, fingerprint, counters)
        self.scheduler: Scheduler = scheduler
        self._images = images

    def _add_sequences(self, request: RunningRequest) -> None:
        self._check_images(request)
        super()._add_sequences(request)

    def _check_images(self, request: RunningRequest) -> None:
        """Raise RequestError for images that this model can't take, or that are not where the prompt has
        placeholders."""
        images = request.params.images
        if not images:
            return
        if self._images is None:
            raise RequestError("The model takes text only, but the request has images. Send it again without them.")
        if why := self._images.unfit(request.params.prompt, images):
            raise RequestError(f"The images do not fit the prompt: {why}. Send the request again.")

    def schedule(self) -> StepPlan:
        """The next step's plan. The first prefill of each request is timed here."""
        plan = self.scheduler.schedule()
        for row in plan.change.rows:
            self._requests[plan.sequences[row.sid].rid].prefilling()
        return plan

    def rids_of(self, plan: StepPlan) -> set[str]:
        return {sequence.rid for sequence in plan.sequences.values()}

    def update(self, plan: StepPlan, tokens: StepTokens, scores: PromptScores) -> None:
        """Give each sequence of the plan the outcome of a forward, and end the choices that end with it. It is emitted
        only after all ranks have acknowledged the step; if the step fails, it is forgotten with the epoch."""
        sequences = plan.sequences
        failed = scores.failed
        rows = plan.logits_rows
        sampled = {
            sid: [token for token in tokens.ids[its.start : its.stop] if token >= 0]  # none where the first row failed
            for sid, its in rows.items()
            if sid not in failed
        }
        self.scheduler.update(
            plan,
            {sid: token_ids[0] for sid, token_ids in sampled.items() if token_ids},
            {sid: len(token_ids) - 1 for sid, token_ids in sampled.items() if token_ids},
        )
        for sid, why in failed.items():
            self.end_choice(sequences[sid], "error", why)
        for sid, scored in scores.tokens.items():
            try:
                self._scored(sequences[sid], scored)
            except Exception:
                self.fail(sequences[sid])
        for sid, token_ids in sampled.items():
            try:
                if token_ids:
                    self._sampled(sequences[sid], token_ids, tokens, rows[sid].start)
                else:
                    self.end_choice(sequences[sid], "error", tokens.failures[rows[sid].start])
            except Exception:
                self.fail(sequences[sid])

    def _sampled(self, sequence: Sequence, token_ids: list[int], tokens: StepTokens, index: int) -> None:
        """Note tokens that were sampled one after the other, in the rows from `index` on. Its choice may end with any
        of them; the later ones are dropped then."""
        if (vector := tokens.vectors.get(index)) is not None:
            self.end_choice(sequence, "stop", vector=vector)
            return
        if not sequence.sampling.max_tokens:
            self.end_choice(sequence, "length")  # only its prompt was asked for
            return
        for place, token in enumerate(token_ids):
            if place:
                sequence.output.append(token)
            if not self.decide(sequence, tokens.logprobs.get(index + place)):
                return

    def _scored(self, sequence: Sequence, scored: list[PromptToken]) -> None:
        """Note the next tokens of a prompt, before any that is sampled after them."""
        entries = prompt_entries(sequence, scored)
        sequence.scored += len(entries)
        self._requests[sequence.rid].append_prompt(sequence.choice, entries)
