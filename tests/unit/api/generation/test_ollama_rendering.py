"""Lines of JSON for Ollama's clients: the same texts and calls however the log comes, and an end that tells why."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.generation.chunks import Durations
from api.generation.ollama_rendering import OllamaRenderer
from api.http.errors import StreamInterrupted
from api.schemas.ollama import ChatAnswer, GenerateAnswer
from api.schemas.view import Calling, Endpoint, Reading, ThinkingMarks, View
from control.clock import now_ms
from control.messages import LogEntry
from tests.integration.api.calling import called
from tests.unit.api.chat.test_answer import EOS, VOCABULARY

CALLS = called("f", '{"a": "naïve 😀", "b": [1, 2]}') + called("g", "{}")
SAYS = f"<think>well</think>So: {CALLS}"


def view_of(endpoint: Endpoint = "ollama_chat", reading: Reading | None = None, received_ms: int = 0) -> View:
    received_ms = received_ms or now_ms()
    return View(endpoint=endpoint, created=1, received_ms=received_ms, model="m", stop_ids=[EOS], reading=reading)


READING = Reading(ThinkingMarks(), Calling("hermes", ["f", "g"]))


def log_of(text: str, finish: str = "stop") -> list[LogEntry]:
    tokens = [*VOCABULARY.tokenizer.encode(text, add_special_tokens=False).ids, EOS]
    last = len(tokens)
    return [
        LogEntry(seq, 0, token, finish if seq == last else None, "token" if seq == last else None)  # type: ignore[arg-type]
        for seq, token in enumerate(tokens, 1)
    ]


def streamed(view: View, log: list[LogEntry], sizes: list[int]) -> list[dict[str, Any]]:
    renderer = OllamaRenderer("abc", view, VOCABULARY, 5)
    data = b""
    for start, end in pairwise(accumulate([*sizes, len(log)], initial=0)):
        if part := log[start:end]:
            data += renderer.feed(0, part)
    assert renderer.finished and renderer.place is None
    return [msgspec.json.decode(line) for line in (data + renderer.end()).splitlines()]


@given(st.lists(st.integers(1, 40), max_size=12))
def test_calls_come_whole_however_the_log_comes(sizes: list[int]) -> None:
    """Reasoning, text and calls are those of the one body, and every line is of the documented type."""
    view, log = view_of(reading=READING), log_of(SAYS)
    lines = streamed(view, log, sizes)
    renderer = OllamaRenderer("abc", view, VOCABULARY, 5)
    pieces = renderer.empty_pieces()
    renderer.collect(pieces, 0, log)
    whole = msgspec.json.decode(renderer.whole(pieces))
    for part in [*lines, whole]:
        msgspec.convert(part, ChatAnswer)
    assert whole["message"]["thinking"] == "".join(line["message"].get("thinking", "") for line in lines) == "well"
    assert whole["message"]["content"] == "".join(line["message"]["content"] for line in lines)
    calls = [call for line in lines for call in line["message"].get("tool_calls", [])]
    assert calls == whole["message"]["tool_calls"]
    assert [call["function"] for call in calls] == [
        {"index": 0, "name": "f", "arguments": {"a": "naïve 😀", "b": [1, 2]}},
        {"index": 1, "name": "g", "arguments": {}},
    ]
    assert (whole["done_reason"], lines[-1]["done_reason"]) == ("stop", "stop")
    assert whole["eval_count"] == lines[-1]["eval_count"] == len(log)


def test_a_call_that_is_cut_off_has_no_arguments() -> None:
    """What can't be shown as an object is shown as an empty one, and the reason of the end says why."""
    cut = SAYS[: SAYS.index("[1, 2]")]
    lines = streamed(view_of(reading=READING), log_of(cut, "length"), [])
    [call] = [call for line in lines for call in line["message"].get("tool_calls", [])]
    assert call["function"] == {"index": 0, "name": "f", "arguments": {}}
    assert lines[-1]["done_reason"] == "length"


@pytest.mark.parametrize("endpoint", ["ollama_chat", "ollama_generate"])
def test_bytes_without_news_are_lines_too(endpoint: Endpoint) -> None:
    """A silence, a place in the queue and an interruption: clients decode each line."""
    renderer = OllamaRenderer("abc", view_of(endpoint), VOCABULARY, 5)
    line = renderer.keep_alive()
    answer = msgspec.json.decode(line, type=ChatAnswer if endpoint == "ollama_chat" else GenerateAnswer)
    assert line.endswith(b"}\n") and not answer.done
    assert renderer.queue_place(3, 100) == renderer.queue_place(None, None) == b""
    interrupted = msgspec.json.decode(renderer.interruption(StreamInterrupted("abc", renderer.place)))
    assert "/v1/requests/abc/events" in interrupted["error"] and interrupted.keys() == {"error"}


def test_durations_add_up_and_are_never_negative() -> None:
    """Also where the clock of the process that took the request is ahead of this one's, or no token came."""
    past = Durations(view_of(received_ms=now_ms() - 5_000))
    assert past.load >= 5_000_000_000
    past.note_token()
    first = past.fields()
    past.note_token()  # a later token changes nothing
    for fields in (first, past.fields()):
        parts = ("load_duration", "prompt_eval_duration", "eval_duration")
        assert sum(fields[name] for name in parts) == fields["total_duration"] >= 5_000_000_000
    assert first["prompt_eval_duration"] == past.fields()["prompt_eval_duration"]
    ahead = Durations(view_of(received_ms=now_ms() + 60_000))
    assert set(ahead.fields().values()) == {0}
