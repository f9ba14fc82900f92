"""Chat completions and completions: from log entries to the chunks of a stream, or to a whole body; and the times of an
answer, for all renderers.

A pure state machine: event ids, joining of tokens, suppression after a resume. The event id `<rid>:<seq>.<part>` names
a place: seq is the log entry up to which everything was sent, part what of that entry. A resumed stream replays the log
from seq 1 through a fresh renderer and sends only what lies beyond the place.
"""

from __future__ import annotations

import copy
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Generic, TypeVar, cast

import msgspec
from msgspec import UNSET, UnsetType

from api.chat.answer import FAILURES, PieceDecoder
from api.chat.piece import CallDelta, Piece, ScoredToken
from api.chat.tokens import Vocabulary
from api.http.errors import GenerationFailed, problem
from api.schemas.answers import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    Completion,
    CompletionChoice,
    CompletionChunk,
    CompletionChunkChoice,
    CompletionLogprobs,
    FunctionCall,
    FunctionCallDelta,
    FunctionToolCall,
    PromptLogprob,
    PromptLogprobs,
    Timings,
    TokenCounts,
    TokenLogprob,
    TokenUsage,
    ToolCallDelta,
    TopLogprob,
    encode,
    encoded_once,
)
from api.schemas.response_answers import ResponseObject, Status
from api.schemas.view import StreamCursor, View, answer_id
from control.messages import FinishReason, LogEntry, PromptToken
from control.requests import member_rid


def finite(logprob: float) -> float:
    """JSON has no infinity: OpenAI shows -9999.0 for a token that could not be chosen."""
    return max(logprob, -9999.0)


def token_logprobs(vocabulary: Vocabulary, name: Callable[[int], str], tokens: list[ScoredToken]) -> list[TokenLogprob]:
    """Each token by its name, with its bytes, its log probability and its alternatives, best first; encoded."""

    def top_logprob(token: int, logprob: float) -> TopLogprob:
        return TopLogprob(name(token), finite(logprob), list(vocabulary.token_bytes(token)))

    return [
        encoded_once(
            TokenLogprob(
                name(token.token),
                finite(token.logprobs.chosen),
                list(vocabulary.token_bytes(token.token)),
                [top_logprob(other, logprob) for other, logprob in token.logprobs.top],
            )
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


_NO_CHOICES = b'"choices":[]'
"""In no other place of a chunk: a text's quotation marks are escaped."""
Chunk = TypeVar("Chunk", ChatCompletionChunk, CompletionChunk)


class Writer(ABC, Generic[Chunk]):
    """Writes one answer as chunks or as a whole."""

    def __init__(self, rid: str, view: View, vocabulary: Vocabulary, prompt_tokens: int, chunk: type[Chunk]) -> None:
        """`chunk`: the type of chunks."""
        self._id = answer_id(rid, view)
        self.chunk: Chunk = chunk(id=self._id, created=view.created, model=view.model, choices=[])
        """The last chunk that was encoded as a whole: only the parts that change are set for the next one."""
        self._view = view
        self._vocabulary = vocabulary
        self._prompt_tokens = prompt_tokens
        self._no_usage = None if view.include_usage else UNSET
        self.timings: Callable[[int], Timings] | None = None
        """llama.cpp's `timings` after so many tokens; None where they are not shown."""
        self._begins = self._ends = b""
        self._encode_around()

    def _encode_around(self) -> None:
        """The bytes before and after the choice of a chunk without counts, which are the same in all of them."""
        self.chunk.choices = list[Any]()
        self.chunk.usage = self._no_usage
        before, after = encode(self.chunk).split(_NO_CHOICES)
        self._begins = b"data: " + before + _NO_CHOICES[:-1]
        self._ends = b"]" + after + b"\n\n"

    def computed_by(self, fingerprint: str | None) -> None:
        """From now on `system_fingerprint` is this one; None: the answer has no such field."""
        shown = UNSET if fingerprint is None else fingerprint
        if shown != self.chunk.system_fingerprint:
            self.chunk.system_fingerprint = shown
            self._encode_around()

    @abstractmethod
    def opening(self, index: int, text: str) -> bytes:
        """The chunk that opens a choice, with `text`; empty where there is nothing to say."""

    @abstractmethod
    def piece(self, index: int, piece: Piece) -> bytes: ...

    @abstractmethod
    def finish(self, index: int, reason: FinishReason, tokens: int) -> bytes: ...

    @abstractmethod
    def whole(self, pieces: list[Piece], counts: TokenCounts) -> bytes:
        """The body of an answer that is not streamed; one collected piece per choice, in order."""

    @abstractmethod
    def _encoded(self, tokens: list[ScoredToken]) -> list[Any]:
        """One value for each token, of which a choice's log probabilities are made."""

    def usage(self, counts: TokenCounts) -> bytes:
        """The chunk with the counts of a whole stream."""
        self.chunk.choices = list[Any]()
        self.chunk.usage = counts.usage()
        if self.timings is not None:
            self.chunk.timings = self.timings(counts.completion_tokens)
        return self._data()

    def _chunk(self, choice: Any, tokens: int) -> bytes:
        """The chunk of a choice, with its counts and times so far where every chunk has them."""
        if not self._view.continuous_usage and self.timings is None:
            return self._begins + encode(choice) + self._ends
        self.chunk.choices = list[Any]([choice])
        self._count(tokens)
        if self.timings is not None:
            self.chunk.timings = self.timings(tokens)
        return self._data()

    def _count(self, tokens: int) -> None:
        prompt = self._prompt_tokens
        self.chunk.usage = (
            TokenUsage(prompt, tokens, prompt + tokens) if self._view.continuous_usage else self._no_usage
        )

    def _data(self) -> bytes:
        return b"data: " + encode(self.chunk) + b"\n\n"

    def _prompt_ids(self, index: int) -> list[int] | UnsetType:
        """The ids of the prompt that a choice answers, where they are shown."""
        return self._view.prompt_ids[index // self._view.n] if self._view.return_ids else UNSET

    def _shown_ids(self, piece: Piece) -> list[int] | UnsetType:
        """The ids of a choice's tokens, as vLLM shows them."""
        return piece.ids if self._view.return_ids else UNSET

    def collect(self, whole: Piece, piece: Piece) -> None:
        """Add a piece to an answer that is not streamed. Log probabilities are encoded here, entry by entry: those of
        all choices together would hold the event loop for seconds."""
        if self._view.logprobs is not None:
            whole.encoded += self._encoded(piece.scored)
        if (count := self._view.prompt_logprobs) is not None:
            whole.encoded_prompt += [encoded_once(self._prompt_token(token, count)) for token in piece.prompt]
        piece.scored = []
        piece.prompt = []
        whole.collect(piece)

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self._view.token_ids else self._vocabulary.token_text(token)

    def _prompt_logprobs(self, piece: Piece) -> PromptLogprobs | UnsetType:
        """The prompt's tokens by id, as vLLM shows them, if they were requested."""
        return UNSET if self._view.prompt_logprobs is None else piece.encoded_prompt

    def _prompt_token(self, token: PromptToken, count: int) -> dict[str, PromptLogprob] | None:
        if token.logprob is None:
            return None
        ranked = {token.token: (token.logprob, token.rank)}
        ranked |= {other: (logprob, place) for place, (other, logprob) in enumerate(token.top[:count], 1)}
        return {
            str(token_id): PromptLogprob(finite(logprob), rank, self._vocabulary.token_text(token_id))
            for token_id, (logprob, rank) in ranked.items()
        }


class ChatWriter(Writer[ChatCompletionChunk]):
    def __init__(self, rid: str, view: View, vocabulary: Vocabulary, prompt_tokens: int) -> None:
        super().__init__(rid, view, vocabulary, prompt_tokens, ChatCompletionChunk)

    def opening(self, index: int, text: str) -> bytes:
        chunk = self.chunk
        chunk.choices = [ChatChunkChoice(index, ChatDelta(role="assistant", content=text))]
        chunk.prompt_token_ids = self._prompt_ids(index)
        self._count(0)
        data = self._data()
        chunk.prompt_token_ids = UNSET
        return data

    def piece(self, index: int, piece: Piece) -> bytes:
        logprobs = None
        if self._view.logprobs is not None:
            logprobs = ChatLogprobs(self._encoded(piece.scored))
        delta = _delta(piece, self._view.functions) if piece.reasoning or piece.calls else ChatDelta(content=piece.text)
        return self._chunk(ChatChunkChoice(index, delta, logprobs, None, self._shown_ids(piece)), piece.tokens)

    def finish(self, index: int, reason: FinishReason, tokens: int) -> bytes:
        return self._chunk(ChatChunkChoice(index, ChatDelta(), None, self._reason(reason)), tokens)

    def whole(self, pieces: list[Piece], counts: TokenCounts) -> bytes:
        return encode(
            ChatCompletion(
                id=self._id,
                created=self._view.created,
                model=self._view.model,
                system_fingerprint=self.chunk.system_fingerprint,
                choices=[self._whole_choice(index, piece) for index, piece in enumerate(pieces)],
                usage=counts.usage(),
                prompt_logprobs=self._prompt_logprobs(pieces[0]),
                prompt_token_ids=self._prompt_ids(0),
                timings=UNSET if self.timings is None else self.timings(counts.completion_tokens),
            )
        )

    def _reason(self, reason: FinishReason | None) -> Any:
        return "function_call" if reason == "tool_calls" and self._view.functions else reason

    def _encoded(self, tokens: list[ScoredToken]) -> list[TokenLogprob]:
        return token_logprobs(self._vocabulary, self._name, tokens)

    def _whole_choice(self, index: int, piece: Piece) -> ChatChoice:
        message = ChatMessage(content=None if piece.calls and not piece.text else piece.text)
        if piece.reasoning:
            message.reasoning = piece.reasoning
            message.reasoning_content = piece.reasoning
        calls = [
            FunctionToolCall(id=call.id, function=FunctionCall(call.name or "", call.arguments)) for call in piece.calls
        ]
        if calls and self._view.functions:
            message.function_call = calls[0].function
        elif calls:
            message.tool_calls = calls
        logprobs = ChatLogprobs(piece.encoded) if self._view.logprobs is not None else None
        return ChatChoice(index, message, logprobs, self._reason(piece.finish), self._shown_ids(piece))


def _delta(piece: Piece, functions: bool) -> ChatDelta:
    """The delta of a chunk that holds more than text; `functions`: in the older form, which has one call."""
    delta = ChatDelta()
    if piece.reasoning:
        delta.reasoning = piece.reasoning
        delta.reasoning_content = piece.reasoning
    if piece.text:
        delta.content = piece.text
    if piece.calls and functions:
        delta.function_call = _call(piece.calls[0]).function
    elif piece.calls:
        delta.tool_calls = [_call(call) for call in piece.calls]
    return delta


def _call(call: CallDelta) -> ToolCallDelta:
    """A part of a call as OpenAI writes it; id, type and name only in its first part."""
    if call.name is None:
        return ToolCallDelta(index=call.index, function=FunctionCallDelta(arguments=call.arguments))
    function = FunctionCallDelta(name=call.name, arguments=call.arguments)
    return ToolCallDelta(index=call.index, id=call.id, type="function", function=function)


class CompletionWriter(Writer[CompletionChunk]):
    def __init__(self, rid: str, view: View, vocabulary: Vocabulary, prompt_tokens: int) -> None:
        super().__init__(rid, view, vocabulary, prompt_tokens, CompletionChunk)

    def opening(self, index: int, text: str) -> bytes:
        if not text and not self._view.return_ids:
            return b""
        ids = [] if self._view.return_ids else UNSET
        choice = CompletionChunkChoice(index, text, token_ids=ids, prompt_token_ids=self._prompt_ids(index))
        self.chunk.choices = list[Any]([choice])
        self._count(0)
        return self._data()

    def piece(self, index: int, piece: Piece) -> bytes:
        logprobs = None
        if self._view.logprobs is not None:
            logprobs = self._joined(self._encoded(piece.scored))
        choice = CompletionChunkChoice(index, piece.text, logprobs, None, self._shown_ids(piece))
        return self._chunk(choice, piece.tokens)

    def finish(self, index: int, reason: FinishReason, tokens: int) -> bytes:
        return self._chunk(CompletionChunkChoice(index, "", None, cast(Any, reason)), tokens)

    def whole(self, pieces: list[Piece], counts: TokenCounts) -> bytes:
        return encode(
            Completion(
                id=self._id,
                created=self._view.created,
                model=self._view.model,
                system_fingerprint=self.chunk.system_fingerprint,
                choices=[self._whole_choice(index, piece) for index, piece in enumerate(pieces)],
                usage=counts.usage(),
                timings=UNSET if self.timings is None else self.timings(counts.completion_tokens),
            )
        )

    def _encoded(self, tokens: list[ScoredToken]) -> list[tuple[str, float | None, dict[str, float] | None, int]]:
        """Of each token its name, its log probability, its alternatives and its place."""
        scored = ((token, token.logprobs) for token in tokens)
        return [
            (self._name(token.token), logprobs and finite(logprobs.chosen), encoded_once(self._top(token)), token.start)
            for token, logprobs in scored
        ]

    def _joined(self, encoded: list[tuple[str, float | None, dict[str, float] | None, int]]) -> CompletionLogprobs:
        return CompletionLogprobs(
            tokens=[name for name, _, _, _ in encoded],
            token_logprobs=[logprob for _, logprob, _, _ in encoded],
            top_logprobs=[top for _, _, top, _ in encoded],
            text_offset=[start for _, _, _, start in encoded],
        )

    def _whole_choice(self, index: int, piece: Piece) -> CompletionChoice:
        return CompletionChoice(
            index,
            piece.text,
            self._joined(piece.encoded) if self._view.logprobs is not None else None,
            cast(Any, piece.finish),
            token_ids=self._shown_ids(piece),
            prompt_token_ids=self._prompt_ids(index),
            prompt_logprobs=self._prompt_logprobs(piece),
        )

    def _top(self, token: ScoredToken) -> dict[str, float] | None:
        """The most likely tokens, and the one itself, as at OpenAI."""
        logprobs = token.logprobs
        if logprobs is None:
            return None
        # Of tokens that read alike the likeliest is shown: the best come first.
        ranked = [(token.token, logprobs.chosen), *reversed(logprobs.top)]
        return {self._name(token_id): finite(logprob) for token_id, logprob in ranked}


_NS_PER_MS = 1_000_000


class Durations:
    """Nanoseconds of one answer, from the moment at which its request came."""

    def __init__(self, view: View) -> None:
        self._received = (view.received_ms or 1000 * view.created) * _NS_PER_MS
        self.load = self.since_received()
        """Until the request was queued."""
        self._first: int | None = None

    def since_received(self) -> int:
        return max(0, time.time_ns() - self._received)

    def note_token(self) -> None:
        """A token is there; the first one counts."""
        if self._first is None:
            self._first = self.since_received()

    def fields(self) -> dict[str, int]:
        """Ollama's durations, as they are at the answer's end."""
        total = self.since_received()
        first = min(total, self._first if self._first is not None else total)
        return {
            "total_duration": total,
            "load_duration": self.load,
            "prompt_eval_duration": max(0, first - self.load),
            "eval_duration": total - first,
        }

    def timings(self, prompt: int, cached: int, generated: int) -> Timings:
        """llama.cpp's `timings`, so far; `cached` of the tokens of the prompt were not computed. The first token comes
        with the prompt, so it counts in no rate."""
        fields = self.fields()
        cached = min(cached, prompt)
        computed = prompt - cached
        prompt_ms = fields["prompt_eval_duration"] / _NS_PER_MS
        predicted_ms = fields["eval_duration"] / _NS_PER_MS
        timed = max(0, generated - 1)
        return Timings(
            cache_n=cached,
            prompt_n=computed,
            prompt_ms=prompt_ms,
            prompt_per_token_ms=prompt_ms / computed if computed else 0.0,
            prompt_per_second=1000 * computed / prompt_ms if prompt_ms else 0.0,
            predicted_n=generated,
            predicted_ms=predicted_ms,
            predicted_per_token_ms=predicted_ms / timed if timed else 0.0,
            predicted_per_second=1000 * timed / predicted_ms if predicted_ms else 0.0,
        )


# Parts of an entry, in the order in which they are sent. Before entry 1, part k+1 of seq 0 opens choice k.
_TEXT = 1
_FINISH = 2
_USAGE = 3
_DONE = 4

# Of a token in an answer, and of one log probability, about.
TEXT_BYTES = 4
SCORE_BYTES = 30


def _scores_bytes(most_likely: int | None) -> int:
    return 0 if most_likely is None else SCORE_BYTES * (1 + most_likely)


class StreamRenderer:
    """Renders one answer of one or several members (prompts); `resume` suppresses what the client already has."""

    media_type = "text/event-stream; charset=utf-8"
    """Of a stream."""

    _stored: list[Piece] | None = None
    """The whole answer, of a stream too, where it is to outlive its request."""

    def __init__(
        self, rid: str, view: View, vocabulary: Vocabulary, prompt_tokens: int, resume: StreamCursor | None = None
    ) -> None:
        self.view = self._view = view
        kind = ChatWriter if view.endpoint == "chat" else CompletionWriter
        self._writer: Writer[Any] = kind(rid, view, vocabulary, prompt_tokens)
        self._prompt_tokens = prompt_tokens
        self.answers = [
            PieceDecoder(vocabulary, view, member_rid(rid, member), view.echo_of(member))
            for member in range(view.members)
        ]
        self._cursor = StreamCursor(rid, [(0, 0)] * view.members)
        self._resumed_at = list(resume.places) if resume is not None and resume.places else [(0, 0)] * view.members
        self._opened = False
        self._durations = Durations(view)
        if view.timed:
            self._writer.timings = self.timings
        if view.endpoint == "chat" and view.extra_fields:
            self._stored = self.empty_pieces()
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
        places = [max(pair) for pair in zip(self._cursor.places, self._resumed_at, strict=True)]
        if not any(seq or part for seq, part in places):
            return None
        return StreamCursor(self._cursor.rid, places).encode().decode()

    @property
    def usage(self) -> TokenCounts:
        return TokenCounts(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=sum(answer.completion_tokens for answer in self.answers),
            cached_tokens=sum(answer.cached_tokens for answer in self.answers),
            reasoning_tokens=sum(answer.reasoning_tokens for answer in self.answers),
            predicted=self._predicted(),
        )

    def timings(self, tokens: int) -> Timings:
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
        answer = self.answers[member]
        resumed_at = self._resumed_at[member]
        self._computed_by(answer.fingerprint or (entries[0].fingerprint if entries else None))
        events: list[bytes] = [] if self._opened else self._open()
        pending: Piece | None = None
        for entry in entries:
            if entry.fingerprint is not None:
                if pending is not None:
                    self._write(member, pending, events)
                    pending = None
                self._computed_by(entry.fingerprint)
            piece = answer.feed(entry)
            if self._stored is not None:
                self._store(member, piece, self._stored)
            if (piece.seq, _TEXT) <= resumed_at:
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

    def _store(self, member: int, piece: Piece, stored: list[Piece]) -> None:
        """Add a copy to the answer that is to be stored: the piece itself is joined with others and muted."""
        copied = copy.copy(piece)
        copied.calls = [replace(delta) for delta in piece.calls]
        self._writer.collect(stored[member * self._view.n + piece.choice], copied)

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
        if self._stored is not None:
            self._stored = pieces
        for entry in entries:
            piece = self.answers[member].feed(entry)
            self._collect(pieces[member * self._view.n + piece.choice], piece)

    def _collect(self, whole: Piece, piece: Piece) -> None:
        self._writer.collect(whole, piece)

    def so_far(self, status: Status) -> ResponseObject:
        """The response as far as it has come, with this status."""
        raise NotImplementedError

    @property
    def to_store(self) -> bytes | None:
        """The answer's body where it is to outlive its request, once it has ended; None for a chat that failed."""
        if self._stored is None or not self.finished or self.failure is not None:
            return None
        return self.with_request(self._stored)

    def with_request(self, pieces: list[Piece]) -> bytes:
        """The body of an answer with the fields of its request that are shown beside it."""
        body = self.whole(pieces)
        fields = self._view.extra_fields
        return body[:-1] + b"," + encode(fields)[1:] if fields else body

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
        if piece.text or not piece.silent:
            self._event(member, (piece.seq, _TEXT), self._writer.piece(index, piece), events)
        if piece.finish is None:
            return
        if piece.finish not in FAILURES:
            self._event(member, (piece.seq, _FINISH), self._writer.finish(index, piece.finish, piece.tokens), events)

    def _event(self, member: int, place: tuple[int, int], chunk: bytes, events: list[bytes]) -> None:
        if place <= self._resumed_at[member]:
            return
        self._cursor.places[member] = place
        events.append(b"id: " + self._cursor.encode() + b"\n" + chunk)
