"""From log entries to the answers of /api/chat and /api/generate: lines of JSON, or one body.

A line can't be a comment and has no id: a silence is ended by a line without text, and a stream that was cut is not
continued, but read again from its beginning (GET /v1/requests/<rid>/events).
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable

from api.chat.piece import CallDelta, Piece, ScoredToken
from api.chat.tokens import Vocabulary
from api.generation.chunks import StreamRenderer, arguments_object, finite
from api.http.errors import ollama_error, problem
from api.schemas.answers import encode
from api.schemas.ollama import (
    ChatAnswer,
    GenerateAnswer,
    OllamaFunction,
    OllamaMessage,
    OllamaToolCall,
    TextAnswer,
    TokenScore,
)
from api.schemas.view import View


class OllamaRenderer(StreamRenderer):
    """Renders an answer of one choice. A call is sent as a whole."""

    media_type = "application/x-ndjson"

    def __init__(self, rid: str, view: View, vocabulary: Vocabulary, prompt_tokens: int) -> None:
        super().__init__(rid, view, vocabulary, prompt_tokens)
        self._vocabulary = vocabulary
        self._growing: CallDelta | None = None
        """The call whose arguments may still grow."""
        self._finish: Piece | None = None

    def keep_alive(self) -> bytes:
        return self._line(self._answer())

    @property
    def place(self) -> str | None:
        return None

    def queue_place(self, position: int | None, wait_ms: int | None) -> bytes:
        return b""

    def load_stage(self, stage: str) -> bytes:
        return b""

    def end(self, error: BaseException | None = None) -> bytes:
        error = error or self.failure
        if error is not None:
            return self.interruption(error)
        assert self._finish is not None
        return self._line(self._ended(self._answer(), self._finish))

    def interruption(self, error: BaseException) -> bytes:
        return encode(ollama_error(problem(error))) + b"\n"

    def _collect(self, whole: Piece, piece: Piece) -> None:
        whole.encoded += self._scores(piece.scored)
        piece.scored = []
        whole.collect(piece)

    def whole(self, pieces: list[Piece]) -> bytes:
        [piece] = pieces
        answer = self._answer(piece.text, piece.reasoning, piece.calls, piece.encoded)
        return encode(self._ended(answer, piece))

    def _open(self) -> list[bytes]:
        self._opened = True
        return []

    def _write(self, member: int, piece: Piece, events: list[bytes]) -> None:
        """Add the line of a piece; the call that is open is in one once the next begins, or the answer ends."""
        calls: list[CallDelta] = []
        for delta in piece.calls:
            if self._growing is not None and self._growing.index == delta.index:
                self._growing.arguments += delta.arguments
            else:
                calls += [self._growing] if self._growing is not None else []
                self._growing = delta
        if piece.finish is not None:
            self._finish = piece
            calls += [self._growing] if self._growing is not None else []
            self._growing = None
        scores = self._scores(piece.scored)
        if piece.text or piece.reasoning or calls or scores:
            events.append(self._line(self._answer(piece.text, piece.reasoning, calls, scores)))

    def _answer(
        self, text: str = "", thinking: str = "", calls: Iterable[CallDelta] = (), scores: Iterable[TokenScore] = ()
    ) -> TextAnswer:
        now = datetime.datetime.now(datetime.UTC)
        if self._view.endpoint == "ollama_generate":
            answer: TextAnswer = GenerateAnswer(model=self._view.model, created_at=now, response=text)
            if thinking:
                answer.thinking = thinking
        else:
            message = OllamaMessage(content=text)
            if thinking:
                message.thinking = thinking
            if answered := [_call(call) for call in calls]:
                message.tool_calls = answered
            answer = ChatAnswer(model=self._view.model, created_at=now, message=message)
        if shown := [*scores]:
            answer.logprobs = shown
        return answer

    def _ended(self, answer: TextAnswer, piece: Piece) -> TextAnswer:
        usage = self.usage
        answer.done = True
        answer.done_reason = "length" if piece.finish == "length" else "stop"
        answer.prompt_eval_count = usage.prompt_tokens
        answer.eval_count = usage.completion_tokens
        for name, value in self._durations.fields().items():
            setattr(answer, name, value)
        return answer

    def _scores(self, tokens: list[ScoredToken]) -> list[TokenScore]:
        if self._view.logprobs is None:
            return []
        scores: list[TokenScore] = []
        for token in tokens:
            if token.logprobs is not None:
                score = self._score(token.token, token.logprobs.chosen)
                if self._view.logprobs:
                    score.top_logprobs = [self._score(other, logprob) for other, logprob in token.logprobs.top]
                scores.append(score)
        return scores

    def _score(self, token: int, logprob: float) -> TokenScore:
        vocabulary = self._vocabulary
        return TokenScore(
            token=vocabulary.token_text(token), logprob=finite(logprob), bytes=[*vocabulary.token_bytes(token)]
        )

    @staticmethod
    def _line(answer: TextAnswer) -> bytes:
        return encode(answer) + b"\n"


def _call(call: CallDelta) -> OllamaToolCall:
    arguments = arguments_object(call.arguments)
    return OllamaToolCall(
        id=call.id, function=OllamaFunction(index=call.index, name=call.name or "", arguments=arguments)
    )
