"""From log entries to vectors and scores: whole bodies, in the form of each endpoint."""

from __future__ import annotations

import array
import base64
import sys
from typing import Any, cast

import msgspec

from api.chat.answer import Answer
from api.chat.piece import Piece
from api.chat.tokens import Vocabulary
from api.errors.errors import problem
from api.rendering.chunks import DONE, StreamRenderer
from api.rendering.durations import Durations
from api.schemas.ollama_answer import EmbedAnswer, EmbeddingsAnswer
from api.schemas.view import View, answer_id
from control.messages import LogEntry
from control.requests import member_rid

_json = msgspec.json.Encoder().encode


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
            Answer(vocabulary, msgspec.structs.replace(view, n=count), member_rid(rid, member))
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
        usage = {"prompt_tokens": self._prompt_tokens, "total_tokens": self._prompt_tokens}
        if self._view.endpoint == "embeddings":
            return _json({"object": "list", "data": self._embeddings(), "model": self._view.model, "usage": usage})
        if self._view.endpoint == "embed":
            return _json(self._by_type())
        if self._view.endpoint == "embedding":
            numbers = enumerate(self._vectors)
            return _json([{"index": at, "embedding": [msgspec.Raw(_json(_numbers(one)))]} for at, one in numbers])
        if self._view.endpoint == "tei_embed":
            return _json([msgspec.Raw(_json(_numbers(vector))) for vector in self._vectors])
        if self._view.endpoint == "tei_rerank":
            return _json([_in_tei_form(result) for result in self._results()])
        if self._view.endpoint in ("ollama_embed", "ollama_embeddings"):
            return _json(self._in_ollamas_form())
        head: dict[str, Any] = {"id": f"{self._view.endpoint}-{self._rid}", "model": self._view.model, "usage": usage}
        if self._view.endpoint == "rerank":
            return _json({**head, "results": self._results()})
        data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(self._scores())]
        return _json({**head, "object": "list", "created": self._view.created, "data": data})

    def _embeddings(self) -> list[dict[str, Any]]:
        """Each vector is encoded for itself, so that other threads may run in between."""
        shown: list[dict[str, Any]] = []
        for index, vector in enumerate(self._vectors):
            if self._view.extra_fields["encoding_format"] == "base64":
                value: Any = base64.b64encode(vector).decode()
            else:
                value = msgspec.Raw(_json(_numbers(vector)))
            shown.append({"object": "embedding", "index": index, "embedding": value})
        return shown

    def _by_type(self) -> dict[str, Any]:
        """Cohere's form."""
        return {
            "response_type": "embeddings_by_type",
            "id": answer_id(self._rid, self._view),
            "embeddings": {"float": [msgspec.Raw(_json(_numbers(vector))) for vector in self._vectors]},
            "meta": {"api_version": {"version": "2"}, "billed_units": {"input_tokens": self._prompt_tokens}},
        }

    def _in_ollamas_form(self) -> EmbedAnswer | EmbeddingsAnswer:
        """The newer form, or that of one text."""
        # Encoded one by one, as in `_embeddings`.
        vectors = [cast(list[float], msgspec.Raw(_json(_numbers(vector)))) for vector in self._vectors]
        if self._view.endpoint == "ollama_embeddings":
            return EmbeddingsAnswer(embedding=vectors[0])
        return EmbedAnswer(
            model=self._view.model,
            embeddings=vectors,
            total_duration=self._durations.since_received(),
            load_duration=self._durations.load,
            prompt_eval_count=self._prompt_tokens,
        )

    def _scores(self) -> list[float]:
        return [_numbers(vector)[0] for vector in self._vectors]

    def _results(self) -> list[dict[str, Any]]:
        """The documents from the highest score to the lowest; of equal ones the first comes first."""
        fields = self._view.extra_fields
        scores = self._scores()
        order = sorted(range(len(scores)), key=lambda index: -scores[index])[: fields["top_n"] or None]
        documents: list[str] | None = fields["documents"]
        return [
            {
                "index": index,
                "relevance_score": scores[index],
                **({} if documents is None else {"document": {"text": documents[index]}}),
            }
            for index in order
        ]


def _in_tei_form(result: dict[str, Any]) -> dict[str, Any]:
    """A result in the form of text-embeddings-inference."""
    text = {"text": result["document"]["text"]} if "document" in result else {}
    return {"index": result["index"], "score": result["relevance_score"], **text}


def _numbers(vector: bytes) -> list[float]:
    numbers = array.array("f", vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()
