"""Answers fit the OpenAPI document: chunks and errors too."""

from __future__ import annotations

from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

import httpx
import jsonschema
import msgspec
import pytest

from tests.byte_model import byte_assets
from tests.integration.api.calling import TEMPLATE, TIME, WEATHER, called
from tests.integration.api.sse import chat, events
from tests.leader import ScriptedLeader
from tests.servers import Server

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"


@pytest.fixture(scope="module")
def document(api: Any) -> dict[str, Any]:
    return httpx.get(f"{api.url}/schema/openapi.json").raise_for_status().json()


def holds(document: dict[str, Any], value: Any, schema: dict[str, Any]) -> None:
    """Raises ValidationError where the value is not what the document says."""
    jsonschema.Draft202012Validator({**schema, "components": document["components"]}).validate(value)


def content(document: dict[str, Any], path: str, method: str = "post", status: str = "200") -> dict[str, Any]:
    response = document["paths"][path][method]["responses"][status]
    if "$ref" in response:
        response = document["components"]["responses"][response["$ref"].rpartition("/")[2]]
    return response["content"]


@pytest.fixture(scope="module")
def leader_of_module(server: Server) -> Iterator[ScriptedLeader]:
    """A leader whose model takes tools."""
    leader = ScriptedLeader(server.url, assets=byte_assets(chat_template=TEMPLATE))
    leader.start()
    yield leader
    leader.stop()


SPEAKS = f"<think>a city</think>It is {called('get_weather', '{}')}"
TURN = {"messages": [{"role": "user", "content": "a"}]}
CLAUDE = {"name": "get_weather", "input_schema": WEATHER["function"]["parameters"]}
BODIES = [
    (CHAT, chat(SPEAKS, tools=[WEATHER, TIME], prompt_logprobs=1)),
    (CHAT, chat(SPEAKS, functions=[WEATHER["function"]])),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 4, "logprobs": 1, "echo": True, "prompt_logprobs": 1}),
    (RESPONSES, {"input": "héllo", "include": ["message.output_text.logprobs"], "top_logprobs": 1}),
    (RESPONSES, {"input": SPEAKS, "tools": [{"type": "function", **WEATHER["function"]}], "instructions": "x"}),
    (RESPONSES, {"input": "x", "max_output_tokens": 16, "reasoning": {"summary": "auto"}, "timings_per_token": True}),
    (MESSAGES, {"max_tokens": 9, **TURN}),
    (MESSAGES, {"max_tokens": 99, "tools": [CLAUDE], "messages": [{"role": "user", "content": SPEAKS}]}),
    (CHAT, chat("héllo", timings_per_token=True)),
    (CHAT, chat("x", n=2, logprobs=True, top_logprobs=2)),
    (COMPLETIONS, {"prompt": ["a", "b"], "max_tokens": 4}),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 4, "logprobs": 2, "timings_per_token": True}),
    ("/completion", {"prompt": "abc", "n_predict": 4, "n_probs": 2, "timings_per_token": True}),
    ("/completion", {"prompt": ["ab", "c"], "n_predict": 4}),
]
LINES = [
    ("/api/chat", TURN),
    ("/api/chat", {"messages": [{"role": "user", "content": SPEAKS}], "tools": [WEATHER], "logprobs": True}),
    ("/api/generate", {"prompt": SPEAKS, "logprobs": True, "top_logprobs": 2}),
    ("/api/generate", {"prompt": "a", "raw": True}),
    ("/api/generate", {"model": "tiny"}),
]


def said(prompt: str) -> str:
    """The model repeats the user's words."""
    return prompt.rpartition("user: ")[2].removesuffix("assistant: ").rstrip("\n")


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_the_fields_of_whole_answers_are_those_of_the_document(
    http: httpx.Client, leader: ScriptedLeader, document: dict[str, Any], path: str, body: dict[str, Any]
) -> None:
    """Every field that comes is named, and every field that is named as there comes."""
    leader.reply = said
    answer = http.post(path, json=body).raise_for_status().json()
    calls = any(f"'{word}'" in str(answer) for word in ("tool_calls", "tool_use", "function_call"))
    assert calls == ("tools" in body or "functions" in body)
    holds(document, answer, content(document, path)["application/json"]["schema"])


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_every_chunk_has_a_type_of_the_document(
    http: httpx.Client, leader: ScriptedLeader, document: dict[str, Any], path: str, body: dict[str, Any]
) -> None:
    """Role, text, end and usage: the data of each event is of a type that the document names for it."""
    kinds = content(document, path)["text/event-stream"]["x-event-data"]
    leader.reply = said
    request_body = {**body, "stream": True}
    if path in (CHAT, COMPLETIONS):
        request_body["stream_options"] = {"include_usage": True}
    request_body.pop("prompt_logprobs", None)  # of whole answers alone
    with http.stream("POST", path, json=request_body) as response:
        response.raise_for_status()
        chunks = [event.data for event in events(response.iter_lines()) if event.data is not None]
    assert len(chunks) > 2
    for chunk in chunks:
        holds(document, chunk, kinds)


@pytest.mark.parametrize(("path", "body"), LINES)
def test_every_line_has_a_type_of_the_document(
    http: httpx.Client, leader: ScriptedLeader, document: dict[str, Any], path: str, body: dict[str, Any]
) -> None:
    """Ollama's dialect: each line of a stream, and the whole answer, are what the document says."""
    kinds = content(document, path)
    leader.reply = said
    lines = [msgspec.json.decode(line) for line in http.post(path, json=body).raise_for_status().text.splitlines()]
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    for line in lines:
        holds(document, line, kinds["application/x-ndjson"]["x-line-data"])
    whole = http.post(path, json={**body, "stream": False}).raise_for_status().json()
    holds(document, whole, kinds["application/json"]["schema"])


def test_an_error_and_an_error_event(http: httpx.Client, leader: ScriptedLeader, document: dict[str, Any]) -> None:
    """A refusal has the one error body, and so has a failure in the middle of a stream."""
    refused = http.post(CHAT, json=chat("x", n="2"))
    assert refused.status_code == 400
    holds(document, refused.json(), content(document, CHAT, status="4XX")["application/json"]["schema"])
    leader.fail_at = 3
    with http.stream("POST", CHAT, json=chat("x", stream=True)) as response:
        failed = [event.data for event in events(response.iter_lines()) if event.data and "error" in event.data]
    assert len(failed) == 1
    holds(document, failed[0], {"$ref": "#/components/schemas/Error"})


def test_messages_are_refused_in_their_own_shape(
    http: httpx.Client, leader: ScriptedLeader, document: dict[str, Any]
) -> None:
    """Anthropic's error body, as its SDK reads it."""
    refused = http.post(MESSAGES, json={"max_tokens": 0, **TURN})
    assert refused.status_code == 400
    holds(document, refused.json(), content(document, MESSAGES, status="4XX")["application/json"]["schema"])


def test_a_field_too_many_is_found(document: dict[str, Any]) -> None:
    """The control: the schemas are closed, so that an answer with more than they name fails these tests."""
    chunk = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [], "more": 1}
    with pytest.raises(jsonschema.ValidationError):
        holds(document, chunk, content(document, CHAT)["text/event-stream"]["x-event-data"])


@pytest.mark.parametrize(
    "path",
    ["/health", "/ping", "/version", "/load", "/ready", "/v1/models", "/api/tags", "/api/ps", "/api/version"],
)
def test_answers_of_the_other_routes_are_those_of_the_document(
    http: httpx.Client, leader: ScriptedLeader, document: dict[str, Any], path: str
) -> None:
    """The process's own routes say what they answer, too."""
    answer = http.get(path)
    assert answer.status_code == 200
    holds(document, answer.json(), content(document, path, "get")["application/json"]["schema"])


def test_no_answer_is_undescribed(document: dict[str, Any]) -> None:
    """Every operation names the type of its answer and of its refusals, and has a summary."""
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            assert operation["summary"], (method, path)
            refusal = content(document, path, method, "4XX")["application/json"]["schema"]["$ref"]
            dialects = {MESSAGES: "MessageError", "/api/": "OllamaError"}
            kinds = [kind for begin, kind in dialects.items() if path.startswith(begin)]
            assert refusal.rpartition("/")[2] == (kinds[0] if kinds else "Error")
            answered = [status for status in operation["responses"] if status.startswith("2")]
            assert answered, path
            for status in answered:
                assert all(media["schema"] for media in content(document, path, method, status).values())


class Links(HTMLParser):
    """The links and sources of a page, and its anchors."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.places: set[str] = set()
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.found.append(value)
            if name == "id" and value:
                self.places.add(value)


def test_the_page_needs_no_other_host(http: httpx.Client, document: dict[str, Any]) -> None:
    """It shows every operation, its links lead somewhere, and no script, style or picture is fetched."""
    page = http.get("/schema")
    assert page.headers["content-type"].startswith("text/html")
    links = Links()
    links.feed(page.text)
    assert not {"script", "link", "img", "iframe"} & links.tags
    assert {f"{method}-{path}" for path, methods in document["paths"].items() for method in methods} <= links.places
    for link in links.found:
        assert link == "/schema/openapi.json" or link.removeprefix("#") in links.places, link
    assert http.get("/docs", follow_redirects=False).headers["location"] == "/schema"
