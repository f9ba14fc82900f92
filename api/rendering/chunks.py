"""Chat completions and completions: from log entries to the chunks of a stream, or to a whole body.

A pure state machine: event ids, joining of tokens, suppression after a resume. Of a chunk only the parts that change
are encoded each time. The event id `<rid>:<seq>.<part>` names a place: seq is the log entry up to which everything was
sent, part what of that entry. A resumed stream replays the log from seq 1 through a fresh renderer and sends only what
lies beyond the place.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec

from api.chat.answer import Answer
from api.chat.piece import CallDelta, Piece, ScoredToken
from api.chat.tokens import Vocabulary
from api.errors.errors import GenerationFailed, problem
from api.rendering.durations import Durations
from api.schemas.view import Cursor, View, answer_id
from control.messages import FinishReason, LogEntry, PromptToken
from control.requests import member_rid

_json = msgspec.json.Encoder().encode


def finite(logprob: float) -> float:
    """JSON has no infinity: OpenAI shows -9999.0 for a token that could not be chosen."""
    return max(logprob, -9999.0)


def raw(value: Any) -> msgspec.Raw:
    """A value that is encoded once, however often it is shown."""
    return msgspec.Raw(_json(value))


def scored_tokens(vocabulary: Vocabulary, name: Callable[[int], str], tokens: list[ScoredToken]) -> list[msgspec.Raw]:
    """Each token by its name, with its bytes, its log probability and its alternatives, best first; encoded."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        return {"token": name(token), "logprob": finite(logprob), "bytes": list(vocabulary.token_bytes(token))}

    return [
        raw(
            {
                **one(token.token, token.logprobs.chosen),
                "top_logprobs": [one(other, logprob) for other, logprob in token.logprobs.top],
            }
        )
        for token in tokens
        if token.logprobs is not None  # only a prompt's first token has none, and no prompt is shown here
    ]


def arguments_object(arguments: str) -> dict[str, Any]:
    """A call's arguments as an object; what is cut off, or no object, can't be shown as one."""
    try:
        return msgspec.json.decode(arguments or "{}", type=dict[str, Any])
    except msgspec.DecodeError:
        return {}


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
        self._tail = b',"usage":null' if view.include_usage else b""
        self.timings: Callable[[int], dict[str, float]] | None = None
        """llama.cpp's `timings` after so many tokens; None where they are not shown."""

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
        """A chunk's end, with the counts and times of its choice where every chunk has them."""
        return self._counts(tokens) + self._times(tokens) + b"}\n\n"

    def _counts(self, tokens: int) -> bytes:
        if not self._view.continuous_usage:
            return self._tail
        counts = (self._prompt_tokens, self._prompt_tokens + tokens, tokens)
        return b',"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d}' % counts

    def _times(self, tokens: int) -> bytes:
        return b"" if self.timings is None else b',"timings":' + _json(self.timings(tokens))

    def _prompt_ids(self, index: int) -> list[int]:
        """The ids of the prompt that a choice answers."""
        return self._view.prompt_ids[index // self._view.n]

    def _shown_ids(self, piece: Piece) -> bytes:
        """The ids of a chunk's tokens as a member of its choice, as vLLM shows them; empty where they are not shown."""
        return b',"token_ids":' + _json(piece.ids) if self._view.return_ids else b""

    def usage(self, usage: Usage) -> bytes:
        times = self._times(usage.completion_tokens)
        return self._head + b'],"usage":' + _json(usage.encode()) + times + b"}\n\n"

    def collect(self, whole: Piece, piece: Piece) -> None:
        """Add a piece to an answer that is not streamed. Log probabilities are encoded here, entry by entry: those of
        all choices together would hold the event loop for seconds."""
        if self._view.logprobs is not None:
            whole.encoded += self._encoded(piece.scored)
        if (count := self._view.prompt_logprobs) is not None:
            whole.encoded_prompt += [raw(self._prompt_token(token, count)) for token in piece.prompt]
        piece.scored = []
        piece.prompt = []
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
            | ({} if self.timings is None else {"timings": self.timings(usage.completion_tokens)})
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
        return self._head + delta + b'},"logprobs":null,"finish_reason":null}]' + ids + self._counts(0) + b"}\n\n"

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
        return (
            self._head + self._choice(index, Piece(0, 0, text), b"null")[:-1] + ids + b"}]" + self._counts(0) + b"}\n\n"
        )

    def _choice(self, index: int, piece: Piece, scored: bytes) -> bytes:
        text = b'{"index":%d,"text":' % index + _json(piece.text) + b',"logprobs":' + scored
        return text + b',"finish_reason":null' + self._shown_ids(piece) + b"}"

    def _end(self, index: int, reason: FinishReason) -> bytes:
        return b'{"index":%d,"text":"","logprobs":null,"finish_reason":"%s"}' % (index, reason.encode())

    def _encoded(self, tokens: list[ScoredToken]) -> list[Any]:
        """Of each token its name, its log probability, its alternatives and its place."""
        scored = ((token, token.logprobs) for token in tokens)
        return [
            (self._name(token.token), one and finite(one.chosen), raw(self._top(token)), token.start)
            for token, one in scored
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
        logprobs = token.logprobs
        if logprobs is None:
            return None
        # Of tokens that read alike the likeliest is shown: the best come first.
        ranked = [(token.token, logprobs.chosen), *reversed(logprobs.top)]
        return {self._name(one): finite(logprob) for one, logprob in ranked}


def writer(rid: str, view: View, vocabulary: Vocabulary, prompt_tokens: int) -> Writer:
    kind = ChatWriter if view.endpoint == "chat" else CompletionWriter
    return kind(rid, view, vocabulary, prompt_tokens)


_TEXT, _FINISH, _USAGE, _DONE = 1, 2, 3, 4
"""Parts of an entry, in the order in which they are sent. Before entry 1, part k+1 of seq 0 opens choice k."""

TEXT_BYTES, SCORE_BYTES = 4, 30
"""Of a token in an answer, and of one log probability, about."""


def _scores_bytes(most_likely: int | None) -> int:
    return 0 if most_likely is None else SCORE_BYTES * (1 + most_likely)


class StreamRenderer:
    """Renders one answer of one or several members (prompts); `resume` suppresses what the client already has."""

    media_type = "text/event-stream; charset=utf-8"
    """Of a stream."""

    _kept: list[Piece] | None = None
    """The whole answer, of a stream too, where it is to outlive its request."""

    def __init__(
        self, rid: str, view: View, vocabulary: Vocabulary, prompt_tokens: int, resume: Cursor | None = None
    ) -> None:
        self.view = self._view = view
        self._writer = writer(rid, view, vocabulary, prompt_tokens)
        self._prompt_tokens = prompt_tokens
        self.answers = [
            Answer(vocabulary, view, member_rid(rid, member), view.echo_of(member)) for member in range(view.members)
        ]
        self._cursor = Cursor(rid, [(0, 0)] * view.members)
        self._had = list(resume.places) if resume is not None and resume.places else [(0, 0)] * view.members
        self._opened = False
        self._durations = Durations(view)
        if view.timed:
            self._writer.timings = self.timings
        if view.endpoint == "chat" and view.extra_fields:
            self._kept = self.empty_pieces()
        self.starting_after = -1
        """Events with numbers up to this one are not sent, where the endpoint numbers its events."""

    def prelude(self) -> bytes:
        """Bytes that may be sent before the first token; otherwise they come with it."""
        return b""

    def keep_alive(self) -> bytes:
        """Bytes that tell nothing, sent after a silence. A comment is one line. With an empty line behind it the
        official clients dispatch an event without data, because they take the id of the event before for a part of
        it."""
        return b": keep-alive\n"

    def queue_place(self, position: int | None, wait_ms: int | None) -> bytes:
        """The comment about a place in the queue, or about its end; empty where streams have no comments."""
        if position is None:
            return b": claimed\n"
        if wait_ms is None:
            return b": queue position %d\n" % position
        return b": queue position %d, expected wait %d ms\n" % (position, wait_ms)

    def load_stage(self, stage: str) -> bytes:
        """The comment about the load of the model; empty where streams have no comments."""
        return b": %s\n" % stage.encode()

    @property
    def finished(self) -> bool:
        return all(answer.finished for answer in self.answers)

    @property
    def failure(self) -> GenerationFailed | None:
        return next((answer.failure for answer in self.answers if answer.failure is not None), None)

    @property
    def place(self) -> str | None:
        """The id of the last event that the client has; None before the first."""
        places = [max(pair) for pair in zip(self._cursor.places, self._had, strict=True)]
        return Cursor(self._cursor.rid, places).encode().decode() if any(seq or part for seq, part in places) else None

    @property
    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=sum(answer.completion_tokens for answer in self.answers),
            cached_tokens=sum(answer.cached_tokens for answer in self.answers),
            reasoning_tokens=sum(answer.reasoning_tokens for answer in self.answers),
            predicted=self._predicted(),
        )

    def timings(self, tokens: int) -> dict[str, float]:
        """llama.cpp's `timings` after so many tokens, with those of all prompts."""
        return self._durations.timings(self._prompt_tokens, self.usage.cached_tokens, tokens)

    def _predicted(self) -> tuple[int, int] | None:
        """Tokens of the prediction that the choices have, and those that they have not."""
        if not self._view.predicted:
            return None
        accepted = sum(answer.predicted_tokens for answer in self.answers)
        return accepted, self._view.predicted * self._view.n * len(self.answers) - accepted

    def feed(self, member: int, entries: list[LogEntry]) -> bytes:
        """The events for new entries of one member; neighbouring tokens of one choice become one chunk."""
        self._durations.note_token()
        self._computed_by(self.answers[member].fingerprint or (entries[0].fingerprint if entries else None))
        events: list[bytes] = [] if self._opened else self._open()
        pending: Piece | None = None
        for entry in entries:
            if entry.fingerprint is not None:
                if pending is not None:
                    self._write(member, pending, events)
                    pending = None
                self._computed_by(entry.fingerprint)
            piece = self.answers[member].feed(entry)
            self._keep(member, piece)
            if (piece.seq, _TEXT) <= self._had[member]:
                piece.mute()
            if pending is None:
                pending = piece
            elif not pending.join(piece):
                self._write(member, pending, events)
                pending = piece
        if pending is not None:
            self._write(member, pending, events)
        return b"".join(events)

    def end(self, error: BaseException | None = None) -> bytes:
        """The last events: an error or the usage, then [DONE]."""
        events: list[bytes] = [] if self._opened else self._open()
        error = error or self.failure
        seq = self.answers[0].seq
        if error is not None:
            self._event(0, (seq, _USAGE), b"data: " + problem(error).encode() + b"\n\n", events)
        elif self._view.include_usage:
            self._event(0, (seq, _USAGE), self._writer.usage(self.usage), events)
        self._cursor.places[0] = (seq, _DONE)
        events.append(b"id: " + self._cursor.encode() + b"\n" + DONE)
        return b"".join(events)

    def _keep(self, member: int, piece: Piece) -> None:
        """Add a copy to the answer that is to be stored: the piece itself is joined with others and muted."""
        if self._kept is not None:
            copied = copy.copy(piece)
            copied.calls = [replace(delta) for delta in piece.calls]
            self._writer.collect(self._kept[member * self._view.n + piece.choice], copied)

    def _computed_by(self, fingerprint: str | None) -> None:
        """Show this fingerprint from now on, where one is known."""
        if fingerprint is not None:
            self._writer.computed_by(fingerprint)

    def empty_pieces(self) -> list[Piece]:
        """One piece per choice over all members, to collect an answer that is not streamed."""
        view = self._view
        return [Piece(0, choice, view.opening(member)) for member in range(view.members) for choice in range(view.n)]

    def whole(self, pieces: list[Piece]) -> bytes:
        """The body of an answer that is not streamed: one piece per choice. It has a fingerprint where all members have
        the same."""
        fingerprints = {answer.fingerprint for answer in self.answers}
        self._writer.computed_by(fingerprints.pop() if len(fingerprints) == 1 else None)
        return self._writer.whole(pieces, self.usage)

    @property
    def body_bytes(self) -> int:
        """About the size of what `whole` reads. The log probabilities of it are as large in its log."""
        view = self._view
        usage = self.usage
        of_prompt = view.logprobs if view.prompt_logprobs is None and view.echo else view.prompt_logprobs
        prompt = usage.prompt_tokens * view.n * _scores_bytes(of_prompt)
        return prompt + usage.completion_tokens * (TEXT_BYTES + _scores_bytes(view.logprobs))

    def collect(self, pieces: list[Piece], member: int, entries: list[LogEntry]) -> None:
        """Add entries to an answer that is not streamed; `pieces` has one element per choice over all members."""
        self._durations.note_token()
        if self._kept is not None:
            self._kept = pieces
        for entry in entries:
            piece = self.answers[member].feed(entry)
            self._writer.collect(pieces[member * self._view.n + piece.choice], piece)

    def so_far(self) -> dict[str, Any]:
        """The answer as far as it has come, where the endpoint shows that."""
        raise NotImplementedError

    @property
    def to_store(self) -> bytes | None:
        """The answer's body where it is to outlive its request, once it has ended; None for a chat that failed."""
        if self._kept is None or not self.finished or self.failure is not None:
            return None
        return self.with_request(self._kept)

    def with_request(self, pieces: list[Piece]) -> bytes:
        """The body of an answer with the fields of its request that are shown beside it."""
        body = self.whole(pieces)
        fields = self._view.extra_fields
        return body[:-1] + b"," + msgspec.json.encode(fields)[1:] if fields else body

    def interruption(self, error: BaseException) -> bytes:
        """The last event of a stream that goes on elsewhere: without an id, so that it is no place, nor [DONE]."""
        return b"data: " + problem(error).encode() + b"\n\n"

    def _open(self) -> list[bytes]:
        self._opened = True
        events: list[bytes] = []
        for member in range(self._view.members):
            for choice in range(self._view.n):
                chunk = self._writer.opening(member * self._view.n + choice, self._view.opening(member))
                if chunk:
                    self._event(member, (0, choice + 1), chunk, events)
        return events

    def _write(self, member: int, piece: Piece, events: list[bytes]) -> None:
        index = member * self._view.n + piece.choice
        if not piece.silent:
            self._event(member, (piece.seq, _TEXT), self._writer.piece(index, piece), events)
        failed = piece.finish in ("cancelled", "expired", "unavailable", "error")
        if piece.finish is not None and not failed:
            self._event(member, (piece.seq, _FINISH), self._writer.finish(index, piece.finish, piece.tokens), events)

    def _event(self, member: int, place: tuple[int, int], chunk: bytes, events: list[bytes]) -> None:
        if place <= self._had[member]:
            return
        self._cursor.places[member] = place
        events.append(b"id: " + self._cursor.encode() + b"\n" + chunk)
