"""Unknown fields: ignored with a warning that is safe to show, or refused by name."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest

from api.schemas.chat import ChatRequest, parse_chat
from api.schemas.completions import parse_completion
from api.schemas.decoding import Warnings
from control.errors import RequestError

HELLO: list[dict[str, Any]] = [{"role": "user", "content": "x"}]


def parsed(warnings: Warnings | None = None, **fields: Any) -> ChatRequest:
    return parse_chat(msgspec.json.encode({"messages": HELLO, **fields}), warnings)


def test_an_unknown_field_is_ignored_with_a_warning() -> None:
    """The rest of the body is read as if the field were not there, and the header names it."""
    warnings = Warnings()
    request = parsed(warnings, colour="red", temperature=0.5)
    assert (request.temperature, request.messages[0].content) == (0.5, "x")
    assert warnings.headers == {"warning": '299 furrow "Unknown fields were ignored: colour."'}
    assert Warnings().headers == {}


def test_strict_refuses_an_unknown_field() -> None:
    """The same body is a 400 that names the field; also where the caller collects no warnings."""
    for warnings in (Warnings(strict=True), None):
        with pytest.raises(RequestError, match="colour") as caught:
            parsed(warnings, colour="red")
        assert (caught.value.param, caught.value.code) == ("colour", "unknown_parameter")


def test_what_clients_echo_inside_messages_is_ignored() -> None:
    """Fields of other servers' answers inside messages, parts, calls and tools need no warning."""
    part = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}
    call = {"id": "1", "function": {"name": "f", "arguments": "{}", "thought": 1}, "extra_content": {}}
    said = {"role": "assistant", "content": None, "tool_calls": [call], "audio": None, "refusal": None}
    echoed = {"annotations": [{"type": "url_citation"}], "reasoning_details": [], "provider_specific_fields": {}}
    tool = {"type": "function", "function": {"name": "f", "cache_control": {}}, "eager": True}
    warnings = Warnings()
    messages = [{"role": "user", "content": [part]}, said | echoed]
    request = parsed(warnings, messages=messages, tools=[tool], stream=True, stream_options={"colour": 1})
    assert [message.role for message in request.messages] == ["user", "assistant"]
    assert warnings.texts == []


@pytest.mark.parametrize(
    "name", ['a"\r\nset-cookie: x', "é" * 100, "\\" * 1_000_000, "a" * 1_000_000, "", "\x00\x7f", "\u2028, 299 x"]
)
def test_a_hostile_name_is_safe_in_a_header(name: str) -> None:
    """No line breaks, quotes or bytes beyond ASCII; a long name is cut."""
    warnings = Warnings()
    parsed(warnings, **{name: 1})
    header = warnings.headers["warning"]
    inner = header.removeprefix('299 furrow "').removesuffix('"')
    assert header.isascii() and header.isprintable() and len(header) < 200
    assert '"' not in inner and "\\" not in inner


def test_thousands_of_unknown_fields() -> None:
    """The header names a few and counts the others, in a time that grows with the body only."""
    warnings = Warnings()
    began = time.perf_counter()
    parsed(warnings, **{f"field{index}": index for index in range(50_000)})
    assert time.perf_counter() - began < 5
    assert "field7 and 49992 more" in warnings.headers["warning"] and len(warnings.headers["warning"]) < 1000


def test_texts_of_parsers_are_bounded_too() -> None:
    """A parser's own warning stands beside the fields, once; with strict it is a refusal."""
    warnings = Warnings()
    warnings.ignore("colour")
    for text in ["A tool was dropped.", "A tool was dropped.", "x" * 1000, *(str(index) for index in range(50))]:
        warnings.add(text)
    header = warnings.headers["warning"]
    assert header.count("A tool was dropped.") == 1 and len(header) < 2000
    assert header.startswith('299 furrow "Unknown fields were ignored: colour.", 299 furrow "A tool was dropped."')
    with pytest.raises(RequestError, match="dropped") as caught:
        Warnings(strict=True).add("A tool was dropped.", "tools[0]")
    assert caught.value.param == "tools[0]"


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages":[],"colour":1,"messages":[{"role":"user","content":"x"}],"colour":2}',
        b'\xef\xbb\xbf{"colour":1,"messages":[{"role":"user","content":"x"}]}',
    ],
)
def test_odd_bodies(body: bytes) -> None:
    """Of a key that comes twice the last counts, as without unknown fields; a byte order mark stands for nothing."""
    assert parse_chat(body, Warnings()).messages[0].content == "x"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b'{"colour":1,"messages":[', "invalid_json"),
        (b'{"colour":1,"messages":[{"role":1,"content":"x"}]}', "invalid_type"),
        (b'{"colour":' + b"[" * 20_000 + b"]" * 20_000 + b',"messages":[]}', "invalid_json"),
        (rb'{"\ud83d":1,"messages":[]}', "invalid_json"),
    ],
)
def test_other_errors_beside_an_unknown_field(body: bytes, code: str) -> None:
    """Any other error is refused as before."""
    with pytest.raises(RequestError) as caught:
        parse_chat(body, Warnings())
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("field", "asks", "neutral"),
    [
        ("mirostat", 2, 0),
        ("use_beam_search", True, False),
        ("length_penalty", 1.2, 1.0),
        ("smoothing_factor", 0.8, 0.0),
        ("epsilon_cutoff", 0.5, 0),
        ("tfs_z", 0.9, 1),
        ("logits_processors", ["x"], []),
        ("guidance_scale", 3, 1),
    ],
)
def test_what_would_alter_the_answer_is_refused_by_name(field: str, asks: Any, neutral: Any) -> None:
    """Samplers that are not implemented are a 400 that names them; values that ask for nothing pass silently."""
    warnings = Warnings()
    with pytest.raises(RequestError, match=field) as caught:
        parsed(warnings, **{field: asks})
    assert (caught.value.param, caught.value.code) == (field, "unsupported_parameter")
    for value in (neutral, None):
        parse_completion(msgspec.json.encode({"prompt": "x", field: value}), warnings)
    assert warnings.texts == []
