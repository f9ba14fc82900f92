"""The bytes of answers: whole bodies, and stream chunks, of which only the parts that change are encoded each time."""

from __future__ import annotations

from typing import Any

import msgspec

from api.chat.piece import CallDelta, Piece, ScoredToken
from api.chat.tokens import Vocabulary
from api.rendering.scores import finite, raw, scored_tokens
from api.schemas.view import View, answer_id
from control.messages import FinishReason, PromptToken

_json = msgspec.json.Encoder().encode

DONE = b"data: [DONE]\n\n"

Event = dict[str, Any]
"""A typed event of /v1/responses or /v1/messages; `type` comes first and is the event's name too."""


class Usage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """Of the prompt tokens: those that were not computed for this answer."""
    reasoning_tokens: int = 0
    """Of the completion tokens: those of the model's reasoning."""
    predicted: tuple[int, int] | None = None
    """Tokens of the prediction that the answer has, and those that it has not; None without a prediction."""

    def encode(self) -> dict[str, Any]:
        total = self.prompt_tokens + self.completion_tokens
        details = {"reasoning_tokens": self.reasoning_tokens}
        if self.predicted is not None:
            accepted, rejected = self.predicted
            details |= {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": total,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": details,
        }


class Writer:
    """Writes one answer as chunks or as a whole; the two endpoints fill in the four `_…` methods."""

    chunk_object = ""
    whole_object = ""

    def __init__(self, rid: str, view: View, vocabulary: Vocabulary, prompt_tokens: int) -> None:
        self._id = answer_id(rid, view)
        self._view = view
        self._vocabulary = vocabulary
        self._about: dict[str, Any] = {"created": view.created, "model": view.model}
        self._fingerprint: str | None = None
        self._head = self._begin()
        self._prompt_tokens = prompt_tokens
        self._tail = b',"usage":null}\n\n' if view.include_usage else b"}\n\n"

    def computed_by(self, fingerprint: str | None) -> None:
        """From now on `system_fingerprint` is this one; None: the answer has no such field."""
        if fingerprint != self._fingerprint:
            self._fingerprint = fingerprint
            self._about.pop("system_fingerprint", None)
            self._about |= {} if fingerprint is None else {"system_fingerprint": fingerprint}
            self._head = self._begin()

    def _begin(self) -> bytes:
        """The beginning of each chunk."""
        return b"data: " + _json({"id": self._id, "object": self.chunk_object} | self._about)[:-1] + b',"choices":['

    def opening(self, index: int, text: str) -> bytes:
        """The chunk that opens a choice, with `text`; empty where there is nothing to say."""
        return b""

    def piece(self, index: int, piece: Piece) -> bytes:
        scored = _json(self._scored(piece.scored)) if self._view.logprobs is not None else b"null"
        return self._head + self._choice(index, piece, scored) + b"]" + self._end_of(piece.tokens)

    def finish(self, index: int, reason: FinishReason, tokens: int) -> bytes:
        return self._head + self._end(index, reason) + b"]" + self._end_of(tokens)

    def _end_of(self, tokens: int) -> bytes:
        """A chunk's end, with the counts of its choice where every chunk has them."""
        if not self._view.continuous_usage:
            return self._tail
        total = self._prompt_tokens + tokens
        counts = (self._prompt_tokens, total, tokens)
        return b',"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d}}\n\n' % counts

    def _prompt_ids(self, index: int) -> list[int]:
        """The ids of the prompt that a choice answers."""
        return self._view.prompt_ids[index // self._view.n]

    def _shown_ids(self, piece: Piece) -> bytes:
        """The ids of a chunk's tokens as a member of its choice, as vLLM shows them; empty where they are not shown."""
        return b',"token_ids":' + _json(piece.ids) if self._view.return_ids else b""

    def usage(self, usage: Usage) -> bytes:
        return self._head + b'],"usage":' + _json(usage.encode()) + b"}\n\n"

    def collect(self, whole: Piece, piece: Piece) -> None:
        """Add a piece to an answer that is not streamed. Log probabilities are encoded here, entry by entry: those of
        all choices together would hold the event loop for seconds."""
        if self._view.logprobs is not None:
            whole.encoded += self._encoded(piece.scored)
        if (count := self._view.prompt_logprobs) is not None:
            whole.encoded_prompt += [raw(self._prompt_token(token, count)) for token in piece.prompt]
        piece.scored, piece.prompt = [], []
        whole.collect(piece)

    def whole(self, pieces: list[Piece], usage: Usage) -> bytes:
        """The body of an answer that is not streamed; one collected piece per choice, in order."""
        return _json(
            {
                "id": self._id,
                "object": self.whole_object,
                **self._about,
                "choices": [self._whole_choice(index, piece) for index, piece in enumerate(pieces)],
                "usage": usage.encode(),
            }
            | self._whole_prompt(pieces)
        )

    def _whole_prompt(self, pieces: list[Piece]) -> dict[str, Any]:
        """Fields of a whole body about the prompt, beside its choices."""
        return {}

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self._view.token_ids else self._vocabulary.token_text(token)

    def _prompt_logprobs(self, piece: Piece) -> dict[str, Any]:
        """The prompt's tokens by id, as vLLM shows them; nothing where they were not asked for."""
        return {} if self._view.prompt_logprobs is None else {"prompt_logprobs": piece.encoded_prompt}

    def _prompt_token(self, token: PromptToken, count: int) -> dict[str, Any] | None:
        if token.logprob is None:
            return None
        ranked = {token.token: (token.logprob, token.rank)}
        ranked |= {other: (logprob, place) for place, (other, logprob) in enumerate(token.top[:count], 1)}
        return {
            str(one): {"logprob": finite(logprob), "rank": rank, "decoded_token": self._vocabulary.token_text(one)}
            for one, (logprob, rank) in ranked.items()
        }

    def _choice(self, index: int, piece: Piece, scored: bytes) -> bytes:
        raise NotImplementedError

    def _end(self, index: int, reason: FinishReason) -> bytes:
        raise NotImplementedError

    def _scored(self, tokens: list[ScoredToken]) -> dict[str, Any]:
        """The log probabilities of a choice, or of a part of it."""
        return self._joined(self._encoded(tokens))

    def _encoded(self, tokens: list[ScoredToken]) -> list[Any]:
        """One value for each token, for `_joined`."""
        raise NotImplementedError

    def _joined(self, encoded: list[Any]) -> dict[str, Any]:
        raise NotImplementedError

    def _whole_choice(self, index: int, piece: Piece) -> dict[str, Any]:
        raise NotImplementedError


class ChatWriter(Writer):
    chunk_object = "chat.completion.chunk"
    whole_object = "chat.completion"

    def opening(self, index: int, text: str) -> bytes:
        delta = b'{"index":%d,"delta":{"role":"assistant","content":' % index + _json(text)
        ids = b',"prompt_token_ids":' + _json(self._prompt_ids(index)) if self._view.return_ids else b""
        return self._head + delta + b'},"logprobs":null,"finish_reason":null}]' + ids + self._end_of(0)

    def _whole_prompt(self, pieces: list[Piece]) -> dict[str, Any]:
        ids = {"prompt_token_ids": self._prompt_ids(0)} if self._view.return_ids else {}
        return self._prompt_logprobs(pieces[0]) | ids

    def _choice(self, index: int, piece: Piece, scored: bytes) -> bytes:
        if piece.reasoning or piece.calls:
            delta = b'{"index":%d,"delta":' % index + _json(_delta(piece, self._view.functions))
        else:
            delta = b'{"index":%d,"delta":{"content":' % index + _json(piece.text) + b"}"
        return delta + b',"logprobs":' + scored + b',"finish_reason":null' + self._shown_ids(piece) + b"}"

    def _end(self, index: int, reason: FinishReason) -> bytes:
        return b'{"index":%d,"delta":{},"logprobs":null,"finish_reason":"%s"}' % (index, self._reason(reason).encode())

    def _reason(self, reason: FinishReason | None) -> Any:
        return "function_call" if reason == "tool_calls" and self._view.functions else reason

    def _encoded(self, tokens: list[ScoredToken]) -> list[Any]:
        return scored_tokens(self._vocabulary, self._name, tokens)

    def _joined(self, encoded: list[Any]) -> dict[str, Any]:
        return {"content": encoded, "refusal": None}

    def _whole_choice(self, index: int, piece: Piece) -> dict[str, Any]:
        scored = self._joined(piece.encoded) if self._view.logprobs is not None else None
        content = None if piece.calls and not piece.text else piece.text
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None, **_reasoning(piece)}
        if piece.calls and self._view.functions:
            message["function_call"] = _call(piece.calls[0])["function"]
        elif piece.calls:
            message["tool_calls"] = [_call(call) for call in piece.calls]
        choice = {"index": index, "message": message, "logprobs": scored, "finish_reason": self._reason(piece.finish)}
        return choice | ({"token_ids": piece.ids} if self._view.return_ids else {})


def _delta(piece: Piece, functions: bool) -> dict[str, Any]:
    """The delta of a chunk that holds more than text; `functions`: in the older form, which has one call."""
    delta: dict[str, Any] = _reasoning(piece)
    if piece.text:
        delta["content"] = piece.text
    if piece.calls and functions:
        delta["function_call"] = _call(piece.calls[0])["function"]
    elif piece.calls:
        delta["tool_calls"] = [{"index": call.index, **_call(call)} for call in piece.calls]
    return delta


def _reasoning(piece: Piece) -> dict[str, Any]:
    """Both names that clients look for."""
    return {"reasoning": piece.reasoning, "reasoning_content": piece.reasoning} if piece.reasoning else {}


def _call(call: CallDelta) -> dict[str, Any]:
    """A call as OpenAI writes it; id, type and name only in its first part."""
    if call.name is None:
        return {"function": {"arguments": call.arguments}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


class CompletionWriter(Writer):
    chunk_object = "text_completion"
    whole_object = "text_completion"

    def opening(self, index: int, text: str) -> bytes:
        if not text and not self._view.return_ids:
            return b""
        ids = b',"prompt_token_ids":' + _json(self._prompt_ids(index)) if self._view.return_ids else b""
        return self._head + self._choice(index, Piece(0, 0, text), b"null")[:-1] + ids + b"}]" + self._end_of(0)

    def _choice(self, index: int, piece: Piece, scored: bytes) -> bytes:
        text = b'{"index":%d,"text":' % index + _json(piece.text) + b',"logprobs":' + scored
        return text + b',"finish_reason":null' + self._shown_ids(piece) + b"}"

    def _end(self, index: int, reason: FinishReason) -> bytes:
        return b'{"index":%d,"text":"","logprobs":null,"finish_reason":"%s"}' % (index, reason.encode())

    def _encoded(self, tokens: list[ScoredToken]) -> list[Any]:
        """Of each token its name, its log probability, its alternatives and its place."""
        known = ((token, token.logprobs) for token in tokens)
        return [
            (self._name(token.token), one and finite(one.chosen), raw(self._top(token)), token.start)
            for token, one in known
        ]

    def _joined(self, encoded: list[Any]) -> dict[str, Any]:
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        return {name: [token[place] for token in encoded] for place, name in enumerate(names)}

    def _whole_choice(self, index: int, piece: Piece) -> dict[str, Any]:
        scored = self._joined(piece.encoded) if self._view.logprobs is not None else None
        choice = {"index": index, "text": piece.text, "logprobs": scored, "finish_reason": piece.finish}
        if self._view.return_ids:
            choice |= {"token_ids": piece.ids, "prompt_token_ids": self._prompt_ids(index)}
        return choice | self._prompt_logprobs(piece)

    def _top(self, token: ScoredToken) -> dict[str, float] | None:
        """The most likely tokens, and the one itself, as at OpenAI."""
        known = token.logprobs
        if known is None:
            return None
        # Of tokens that read alike the likeliest is shown: the best come first.
        ranked = [(token.token, known.chosen), *reversed(known.top)]
        return {self._name(one): finite(logprob) for one, logprob in ranked}


def writer(rid: str, view: View, vocabulary: Vocabulary, prompt_tokens: int) -> Writer:
    kind = ChatWriter if view.endpoint == "chat" else CompletionWriter
    return kind(rid, view, vocabulary, prompt_tokens)
