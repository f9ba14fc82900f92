"""The answers with vectors or scores, in the form of each endpoint, from log entries to whole bodies."""

from __future__ import annotations

import array
import base64
import sys

import msgspec
from msgspec import UNSET, UnsetType

from api.chat.answer import PieceDecoder
from api.chat.piece import Piece
from api.chat.tokens import Vocabulary
from api.generation.chunks import DONE, Durations, StreamRenderer
from api.http.errors import problem
from api.schemas.answers import encode, encoded_once
from api.schemas.embeddings import (
    ApiVersion,
    BilledUnits,
    EmbeddedByType,
    Embedding,
    Embeddings,
    EmbedMeta,
    InputUsage,
    NativeVector,
    RankedDocument,
    RankedResult,
    Reranked,
    Score,
    Scores,
    TextScore,
    VectorsByType,
)
from api.schemas.ollama import EmbedAnswer, EmbeddingsAnswer
from api.schemas.view import View, answer_id
from control.messages import LogEntry
from control.requests import member_rid

VECTORS = frozenset(
    (
        "embeddings",
        "embed",
        "embedding",
        "tei_embed",
        "tei_rerank",
        "rerank",
        "score",
        "ollama_embed",
        "ollama_embeddings",
    )
)
"""The endpoints whose answers are vectors or scores."""


class VectorRenderer(StreamRenderer):
    """Collects the vector of each input; members are packs of neighbouring inputs."""

    def __init__(self, rid: str, view: View, vocabulary: Vocabulary, prompt_tokens: int) -> None:
        counts: list[int] = view.extra_fields["inputs"]
        self.view = self._view = view
        self._rid = rid
        self._prompt_tokens = prompt_tokens
        self.answers = [
            PieceDecoder(vocabulary, msgspec.structs.replace(view, n=count), member_rid(rid, member))
            for member, count in enumerate(counts)
        ]
        self._first = [sum(counts[:member]) for member in range(len(counts))]
        self._vectors: list[bytes] = [b""] * sum(counts)
        self._durations = Durations(view)

    @property
    def place(self) -> str | None:
        return None

    @property
    def body_bytes(self) -> int:
        return sum(map(len, self._vectors))

    def feed(self, member: int, entries: list[LogEntry]) -> bytes:
        self.collect([], member, entries)
        return b""

    def collect(self, pieces: list[Piece], member: int, entries: list[LogEntry]) -> None:
        for entry in entries:
            self.answers[member].feed(entry)
            if entry.vector is not None:
                self._vectors[self._first[member] + entry.choice] = entry.vector

    def empty_pieces(self) -> list[Piece]:
        return []

    def end(self, error: BaseException | None = None) -> bytes:
        """The body as one event, or the error; then [DONE]."""
        error = error or self.failure
        body = self.whole([]) if error is None else problem(error).encode()
        return b"data: " + body + b"\n\n" + DONE

    def whole(self, pieces: list[Piece]) -> bytes:
        return encode(self._whole())

    def _whole(self) -> object:
        """The answer in the endpoint's form."""
        view = self._view
        usage = InputUsage(self._prompt_tokens, self._prompt_tokens)
        match view.endpoint:
            case "embeddings":
                return Embeddings(data=self._embeddings(), model=view.model, usage=usage)
            case "embed":
                meta = EmbedMeta(ApiVersion(), BilledUnits(self._prompt_tokens))
                return EmbeddedByType(
                    id=answer_id(self._rid, view), embeddings=VectorsByType(self._encoded_vectors()), meta=meta
                )
            case "embedding":
                return [NativeVector(index, [vector]) for index, vector in enumerate(self._encoded_vectors())]
            case "tei_embed":
                return self._encoded_vectors()
            case "tei_rerank":
                return [TextScore(index, score, self._text(index)) for index, score in self._ranked()]
            case "ollama_embeddings":
                return EmbeddingsAnswer(embedding=self._encoded_vectors()[0])
            case "ollama_embed":
                return EmbedAnswer(
                    model=view.model,
                    embeddings=self._encoded_vectors(),
                    total_duration=self._durations.since_received(),
                    load_duration=self._durations.load,
                    prompt_eval_count=self._prompt_tokens,
                )
            case "rerank":
                return Reranked(
                    f"rerank-{self._rid}", view.model, usage, [self._result(*place) for place in self._ranked()]
                )
            case _:
                scores = [Score(index=index, score=score) for index, score in enumerate(self._scores())]
                return Scores(id=f"score-{self._rid}", model=view.model, usage=usage, created=view.created, data=scores)

    def _encoded_vectors(self) -> list[list[float]]:
        """Each vector is encoded for itself, so that other threads may run in between."""
        return [encoded_once(_numbers(vector)) for vector in self._vectors]

    def _embeddings(self) -> list[Embedding]:
        if self._view.extra_fields["encoding_format"] == "base64":
            vectors: list[str] | list[list[float]] = [base64.b64encode(vector).decode() for vector in self._vectors]
        else:
            vectors = self._encoded_vectors()
        return [Embedding(index=index, embedding=vector) for index, vector in enumerate(vectors)]

    def _scores(self) -> list[float]:
        return [_numbers(vector)[0] for vector in self._vectors]

    def _text(self, index: int) -> str | UnsetType:
        """The text of a document, where it is shown."""
        documents: list[str] | None = self._view.extra_fields["documents"]
        return UNSET if documents is None else documents[index]

    def _ranked(self) -> list[tuple[int, float]]:
        """Places and scores of the documents from the highest score to the lowest; of equal ones the first comes
        first."""
        scores = self._scores()
        order = sorted(range(len(scores)), key=lambda index: -scores[index])
        return [(index, scores[index]) for index in order[: self._view.extra_fields["top_n"] or None]]

    def _result(self, index: int, score: float) -> RankedResult:
        text = self._text(index)
        return RankedResult(index, score, UNSET if text is UNSET else RankedDocument(text))


def _numbers(vector: bytes) -> list[float]:
    numbers = array.array("f", vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()
