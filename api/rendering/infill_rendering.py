"""The answer to /infill in llama.cpp's form: parts of the text, and the counts with the last one."""

from __future__ import annotations

from typing import Any

import msgspec

from api.chat.piece import Piece
from api.errors.errors import problem
from api.rendering.chunks import StreamRenderer

_json = msgspec.json.Encoder().encode
_TEXT, _LAST = 1, 2
"""Parts of an entry."""


class InfillRenderer(StreamRenderer):
    """Renders an answer of one choice. A stream ends with the event that has `stop: true`, without `[DONE]`."""

    _ended: Piece | None = None
    _lines = False

    def end(self, error: BaseException | None = None) -> bytes:
        events: list[bytes] = []
        error = error or self.failure
        seq = self.answers[0].seq
        if error is not None:
            self._event(0, (seq, _LAST), b"data: " + problem(error).encode() + b"\n\n", events)
        elif self._ended is not None:
            self._event(0, (seq, _LAST), _event(self._last(self._ended, "")), events)
        return b"".join(events)

    def whole(self, pieces: list[Piece]) -> bytes:
        [piece] = pieces
        self._lines = "\n" in piece.text
        return _json(self._last(piece, piece.text))

    def _open(self) -> list[bytes]:
        self._opened = True
        return []

    def _write(self, member: int, piece: Piece, events: list[bytes]) -> None:
        self._lines = self._lines or "\n" in piece.text
        if not piece.silent:
            part = {"index": 0, "content": piece.text, "tokens": [], "stop": False, "id_slot": -1, **self._counts()}
            self._event(member, (piece.seq, _TEXT), _event(part), events)
        if piece.finish in ("stop", "length"):
            self._ended = piece

    def _last(self, piece: Piece, text: str) -> dict[str, Any]:
        usage = self.usage
        kind = "limit" if piece.finish == "length" else "eos" if piece.stop is None else "word"
        return {
            "index": 0,
            "content": text,
            "tokens": [],
            "id_slot": -1,
            "stop": True,
            "model": self.view.model,
            **self._counts(),
            "has_new_line": self._lines,
            "truncated": False,
            "stop_type": kind,
            "stopping_word": piece.stop or "",
            "tokens_cached": usage.prompt_tokens + usage.completion_tokens,
            "timings": {
                "cache_n": usage.cached_tokens,
                "prompt_n": usage.prompt_tokens - usage.cached_tokens,
                "predicted_n": usage.completion_tokens,
            },
        }

    def _counts(self) -> dict[str, int]:
        usage = self.usage
        return {"tokens_predicted": usage.completion_tokens, "tokens_evaluated": usage.prompt_tokens}


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + _json(data) + b"\n\n"
