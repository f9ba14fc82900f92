"""Answers in every dialect, streamed and whole, have the recorded bytes (recorded.json).

`python -m tests.unit.api.generation.test_recorded_bytes` records them anew, after a change that clients are to see.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Union
from unittest.mock import patch

import msgspec
import pytest

from api.generation.chunks import StreamRenderer
from api.generation.seals import Seal
from api.generation.session import renderer_of
from api.http.errors import StreamInterrupted
from api.schemas.answers import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CompletionChunk,
)
from api.schemas.embeddings import EmbeddedByType, Embeddings, NativeVector, Reranked, Scores, TextScore
from api.schemas.llama_cpp import NativePart, NativeResult
from api.schemas.messages import MessageEvent, MessageObject
from api.schemas.ollama import ChatAnswer, EmbedAnswer, EmbeddingsAnswer, GenerateAnswer
from api.schemas.response_answers import RESPONSE_EVENTS, ResponseObject
from api.schemas.view import Calling, Endpoint, Reading, ThinkingMarks, View
from control.messages import FinishReason, LogEntry, PromptToken, TokenLogprobs
from tests.integration.api.calling import WEATHER, called
from tests.unit.api.chat.test_answer import EOS, VOCABULARY
from tests.unit.api.response_fields import response_fields

RECORDED = Path(__file__).parent / "recorded.json"
NOW_NS = 1_700_000_003_000_000_000
RECEIVED_MS = 1_700_000_000_000
_TIMES = re.compile(rb'"created_at":"[^"]+"')
NAMES = ["get_weather", "run", "box__inside", "local_shell", "shell", "apply_patch"]
READING = Reading(ThinkingMarks(), Calling("hermes", NAMES))
SPEAKS = "<think>a city</think>It is " + called("get_weather", '{"city": "Paris"}')
FUNCTION = {"type": "function", **WEATHER["function"]}


@dataclass(frozen=True)
class Case:
    """An answer: what the model says, and how it is shown."""

    text: str
    view: View
    finish: FinishReason = "stop"
    cause: str | None = "token"
    scored: bool = False
    extra: dict[str, Any] = field(default_factory=dict[str, Any])
    seal: Seal | None = None


def view(endpoint: Endpoint, **fields: Any) -> View:
    common: dict[str, Any] = {"created": 1_700_000_000, "received_ms": RECEIVED_MS, "model": "m", "stop_ids": [EOS]}
    return View(**({"endpoint": endpoint} | common | fields))


def response(body: dict[str, Any], **fields: Any) -> View:
    """The view of a body of /v1/responses."""
    shown = response_fields(store=True, **body) | fields.pop("extra_fields", {})
    return view("responses", reading=READING, stream=True, extra_fields=shown, **fields)


def message(**fields: Any) -> View:
    extra = {"hides_thinking": False, "cut": False}
    return view("messages", reading=READING, extra_fields=extra | fields.pop("extra_fields", {}), **fields)


def vector(endpoint: Endpoint, **extra_fields: Any) -> Case:
    return Case("", view(endpoint, extra_fields={"inputs": [2], **extra_fields}), extra={"vectors": 2})


def log_of(case: Case) -> list[LogEntry]:
    """The token log: choices speak in turns."""
    if "vectors" in case.extra:
        return [
            LogEntry(seq, seq - 1, None, "stop", "vector", vector=b"\x00\x00\x80\x3f" + bytes([0, 0, seq, 0x3E]))
            for seq in (1, 2)
        ]
    tokens = VOCABULARY.tokenizer.encode(case.text, add_special_tokens=False).ids
    if case.cause == "token" and case.finish == "stop":
        tokens = [*tokens, EOS]
    entries: list[LogEntry] = []
    for at, token in enumerate(tokens):
        for choice in range(case.view.n):
            last = at == len(tokens) - 1
            entries.append(
                LogEntry(
                    len(entries) + 1,
                    choice,
                    token,
                    case.finish if last else None,
                    case.cause if last else None,
                    TokenLogprobs(-0.5, [(token, -0.5), (66, -1e9)]) if case.scored else None,
                    2 if not entries else None,
                    case.extra.get("prompt") if at == 0 else None,
                    fingerprint=case.extra.get("fingerprint") if not entries else None,
                    predicted=3 if last and case.view.predicted else None,
                )
            )
    return entries


def sealed(kind: str, text: str) -> str:
    return f"f1.{kind}.{len(text)}"


USER_ITEM = {
    "id": "msg_0",
    "type": "message",
    "status": "completed",
    "role": "user",
    "content": [{"type": "input_text", "text": "x"}],
}
TOOLS: list[dict[str, Any]] = [
    FUNCTION,
    {"type": "custom", "name": "run"},
    {"type": "namespace", "name": "box", "description": "d", "tools": [{"type": "function", "name": "inside"}]},
    {"type": "local_shell"},
    {"type": "apply_patch"},
]
PROMPT = [PromptToken(65), PromptToken(66, -0.25, 3, [(67, -0.125)])]
CASES: dict[str, Case] = {
    "chat": Case("naïve", view("chat", include_usage=True)),
    "chat calls": Case(SPEAKS, view("chat", reading=READING, continuous_usage=True)),
    "chat functions": Case(SPEAKS, view("chat", reading=READING, functions=True)),
    "chat scores": Case("né", view("chat", logprobs=2, n=2, token_ids=True), scored=True),
    "chat ids": Case("ab", view("chat", return_ids=True, prompt_ids=[[1, 2]], shown_first="first ")),
    "chat prompt": Case("a", view("chat", prompt_logprobs=1), extra={"prompt": PROMPT}),
    "chat timed": Case("a", view("chat", timed=True, include_usage=True), extra={"fingerprint": "fp_1"}),
    "chat prediction": Case("abc", view("chat", predicted=5, include_usage=True), "length", None),
    "chat stored": Case("ab", view("chat", extra_fields={"metadata": {"k": "v"}, "input_user": None})),
    "chat failed": Case("ab", view("chat"), "error", "the group failed"),
    "completions": Case("ab", view("completions", include_usage=True, n=2)),
    "completions echo": Case("ab", view("completions", echo=["AB"], return_ids=True, prompt_ids=[[65, 66]])),
    "completions scores": Case("né", view("completions", logprobs=1), scored=True, extra={"fingerprint": "fp_1"}),
    "completions prompt": Case("a", view("completions", prompt_logprobs=0), extra={"prompt": PROMPT}),
    "completions timed": Case("a", view("completions", timed=True, continuous_usage=True), "length", None),
    "responses": Case("né", response({"instructions": "x", "metadata": {"k": "v"}, "user": "u"})),
    "responses scores": Case("né", response({"max_output_tokens": 9}, logprobs=1), scored=True),
    "responses call": Case(SPEAKS, response({"tools": TOOLS, "background": True}, timed=True)),
    "responses summary": Case(SPEAKS, response({"reasoning": {"summary": "auto"}, "tools": TOOLS})),
    "responses sealed": Case(
        SPEAKS,
        response({"include": ["reasoning.encrypted_content"], "tools": TOOLS}),
        seal=sealed,
    ),
    "responses custom": Case(called("run", '{"input": "a\\nb"}'), response({"tools": TOOLS})),
    "responses custom, another form": Case(called("run", '{"code": "x"}'), response({"tools": TOOLS})),
    "responses namespace": Case(
        called("box__inside", "{}"),
        response({"tools": TOOLS}),
    ),
    "responses local shell": Case(
        called("local_shell", '{"command": ["ls"], "timeout_ms": 5}'),
        response({"tools": TOOLS}),
    ),
    "responses shell": Case(
        called("shell", '{"commands": ["ls", "pwd"]}'),
        response({"tools": [{"type": "shell", "environment": {"type": "local"}}]}),
    ),
    "responses patch": Case(
        called("apply_patch", '{"type": "create_file", "path": "a", "diff": "+b"}'),
        response({"tools": TOOLS}),
    ),
    "responses summed up": Case("short", response({}, extra_fields={"compaction": None}), seal=sealed),
    "responses compacted": Case("short", response({}, extra_fields={"compaction": [USER_ITEM]}), seal=sealed),
    "responses cut": Case("abc", response({}), "length", None),
    "responses failed": Case("ab", response({}), "error", "the group failed"),
    "responses cancelled": Case("ab", response({}), "cancelled", None),
    "messages": Case("né", message()),
    "messages calls": Case(SPEAKS, message()),
    "messages hidden": Case(SPEAKS, message(extra_fields={"hides_thinking": True})),
    "messages edited": Case(
        "abc",
        message(
            extra_fields={
                "cut": True,
                "applied_edits": [
                    {"type": "clear_tool_uses_20250919", "cleared_tool_uses": 1, "cleared_input_tokens": 5}
                ],
            }
        ),
        "length",
        None,
    ),
    "messages stopped": Case("one STOP", message(stop=["STOP"]), "stop", "STOP"),
    "messages failed": Case("ab", message(), "error", "the group failed"),
    "ollama chat": Case(SPEAKS, view("ollama_chat", reading=READING)),
    "ollama chat scores": Case("né", view("ollama_chat", logprobs=1), scored=True),
    "ollama generate": Case(
        "<think>so</think>né", view("ollama_generate", reading=Reading(ThinkingMarks())), "length", None
    ),
    "ollama failed": Case("ab", view("ollama_chat"), "error", "the group failed"),
    "infill": Case("a\nb", view("infill", extra_fields={"fills_context": True}), "length", None),
    "completion": Case(
        "né",
        view(
            "completion",
            n=2,
            logprobs=1,
            timed=True,
            extra_fields={
                "return_tokens": True,
                "prompt_tokens": [3],
                "generation_settings": {"n_predict": 4, "stream": True},
                "prompts": ["p"],
            },
        ),
        scored=True,
    ),
    "completion fields": Case(
        "ab",
        view("completion", stop=["b"], extra_fields={"response_fields": ["content", "timings/prompt_n", "stop_type"]}),
        "stop",
        "b",
    ),
    "embeddings": vector("embeddings", encoding_format="float"),
    "embeddings base64": vector("embeddings", encoding_format="base64"),
    "embed": vector("embed"),
    "embedding": vector("embedding"),
    "tei embed": vector("tei_embed"),
    "tei rerank": vector("tei_rerank", top_n=None, documents=["one", "two"]),
    "rerank": vector("rerank", top_n=1, documents=["one", "two"]),
    "rerank without texts": vector("rerank", top_n=None, documents=None),
    "score": vector("score"),
    "ollama embed": vector("ollama_embed"),
    "ollama embeddings": vector("ollama_embeddings"),
}


def renderer(case: Case) -> StreamRenderer:
    return renderer_of("ab" * 16, case.view, VOCABULARY, 7, None, case.seal)


def streamed(case: Case, size: int) -> bytes:
    """The whole stream of a log that comes in parts of `size` entries."""
    stream = renderer(case)
    log = log_of(case)
    data = stream.prelude()
    for start in range(0, len(log), size):
        data += stream.feed(0, log[start : start + size])
    return data + stream.interruption(StreamInterrupted(stream.view.model, stream.place)) + stream.end()


def whole(case: Case) -> bytes:
    """The body of the same answer, as it is stored where that has more; empty where it failed."""
    answer = renderer(case)
    pieces = answer.empty_pieces()
    answer.collect(pieces, 0, log_of(case))
    if answer.failure is not None and case.view.endpoint != "responses":
        return b""
    return answer.with_request(pieces) if case.view.endpoint == "chat" else answer.whole(pieces)


def bytes_of(case: Case) -> dict[str, list[str]]:
    """Each way to show an answer, in lines."""
    with (
        patch.object(time, "time_ns", lambda: NOW_NS),
        patch.object(time, "time", lambda: NOW_NS / 1e9),
    ):
        shown = {"stream": streamed(case, 1), "joined": streamed(case, 5), "whole": whole(case)}
    if shown["joined"] == shown["stream"]:  # where each token has events of its own
        del shown["joined"]
    return {name: _TIMES.sub(b'"created_at":"now"', data).decode().splitlines() for name, data in shown.items()}


@pytest.mark.parametrize("name", CASES)
def test_the_bytes_of_an_answer_are_those_that_were_recorded(name: str) -> None:
    """Streamed token by token, in parts, and whole."""
    recorded = msgspec.json.decode(RECORDED.read_bytes())
    assert bytes_of(CASES[name]) == recorded[name]


RESPONSE_EVENT = Union[RESPONSE_EVENTS]  # type: ignore[valid-type]  # noqa: UP007
WHOLE: dict[str, Any] = {
    "chat": ChatCompletion,
    "completions": Completion,
    "responses": ResponseObject,
    "messages": MessageObject,
    "ollama_chat": ChatAnswer,
    "ollama_generate": GenerateAnswer,
    "infill": NativeResult,
    "completion": list[NativeResult],
    "embeddings": Embeddings,
    "embed": EmbeddedByType,
    "embedding": list[NativeVector],
    "tei_embed": list[list[float]],
    "tei_rerank": list[TextScore],
    "rerank": Reranked,
    "score": Scores,
    "ollama_embed": EmbedAnswer,
    "ollama_embeddings": EmbeddingsAnswer,
}
"""The types of bodies by endpoint."""
EVENTS: dict[str, Any] = {
    "chat": ChatCompletionChunk,
    "completions": CompletionChunk,
    "responses": RESPONSE_EVENT,
    "messages": MessageEvent,
    "infill": NativePart,
    "completion": NativePart,
}
"""The types of events' data by endpoint; the last event of a native answer is a NativeResult."""
OTHER_FIELDS = ("chat stored", "completion fields", "responses compacted")
"""Bodies with fields of the request beside them, with some fields alone, or of another type."""


@pytest.mark.parametrize("name", [name for name in CASES if name not in OTHER_FIELDS])
def test_the_types_of_answers_describe_the_bytes(name: str) -> None:
    """Every body and every event decodes into its struct, which has no other fields, and encodes to the same bytes."""
    case = CASES[name]
    recorded = msgspec.json.decode(RECORDED.read_bytes())[name]
    for line in recorded["whole"]:
        if case.view.endpoint.startswith("ollama_"):
            msgspec.json.decode(line.replace('"now"', '"2026-01-01T00:00:00Z"'), type=WHOLE[case.view.endpoint])
        else:
            decoded = msgspec.json.decode(line, type=WHOLE[case.view.endpoint])
            assert msgspec.json.encode(decoded).decode() == line
    for line in recorded["stream"] if case.view.endpoint in EVENTS else []:
        if line.startswith("data: {") and not line.startswith('data: {"error"'):
            data = line.removeprefix("data: ")
            decoded = msgspec.json.decode(data, type=_event_type(case.view.endpoint, data))
            assert msgspec.json.encode(decoded).decode() == data


def _event_type(endpoint: str, data: str) -> Any:
    native = endpoint in ("infill", "completion")
    return (NativeResult if '"stop":true' in data else NativePart) if native else EVENTS[endpoint]


def test_no_record_is_left_over() -> None:
    """Every recorded answer is one that is rendered."""
    assert msgspec.json.decode(RECORDED.read_bytes()).keys() == CASES.keys()


if __name__ == "__main__":
    answers = {name: bytes_of(case) for name, case in CASES.items()}
    RECORDED.write_bytes(msgspec.json.format(msgspec.json.encode(answers), indent=1) + b"\n")
