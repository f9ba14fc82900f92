"""Unknown fields are a Warning header or a 400: on whole answers and streams, with a log line; the 400 with
--strict."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.schemas.chat import ChatRequest
from api.schemas.completions import CompletionRequest
from api.schemas.messages import MessageRequest
from api.schemas.responses import ResponseRequest
from api.schemas.tolerance import TABLE, Alias, Hint, Unsupported
from control.messages import Grammar
from tests.integration.api.conftest import ApiProcess, running_api
from tests.integration.api.sse import chat, events
from tests.leader import ScriptedLeader
from tests.servers import Server

HEADER = '299 furrow "Unknown fields were ignored: colour."'
SAID: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": chat("x"),
    "/v1/chat/completions/input_tokens": chat("x"),
    "/v1/completions": {"prompt": "x"},
    "/v1/responses": {"input": "x"},
    "/v1/responses/input_tokens": {"input": "x"},
    "/v1/messages": SAID,
    "/v1/messages/count_tokens": {"messages": SAID["messages"]},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [65]},
}
STREAMED = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")


BUDGET = [name for name, row in TABLE.items() if row == Alias(("thinking_token_budget",))]
"""Names of what only a model with reasoning has."""
HINTS = [name for name, row in TABLE.items() if isinstance(row, Hint)]
REFUSED = [(name, row) for name, row in TABLE.items() if isinstance(row, Unsupported)]
RENAMED: dict[str, tuple[str, Any, str, Any]] = {
    # The path that lacks the name, a value, and the member of the leader's parameters that must have it.
    "repeat_penalty": ("/v1/chat/completions", 1.25, "repetition_penalty", 1.25),
    "typical": ("/v1/chat/completions", 0.5, "typical_p", 0.5),
    "n_predict": ("/v1/completions", 3, "max_tokens", 3),
    "max_new_tokens": ("/v1/completions", 3, "max_tokens", 3),
    "max_tokens": ("/v1/responses", 3, "max_tokens", 3),
    "max_completion_tokens": ("/v1/completions", 3, "max_tokens", 3),
    "max_output_tokens": ("/v1/chat/completions", 3, "max_tokens", 3),
    "n_cmpl": ("/v1/completions", 2, "n", 2),
    "stop_sequences": ("/v1/chat/completions", ["ZZ"], "stop", ["ZZ"]),
    "stop": ("/v1/messages", ["ZZ"], "stop", ["ZZ"]),
    "regex": ("/v1/chat/completions", "a+", "grammar", Grammar("regex", "a+")),
    "ebnf": ("/v1/chat/completions", 'root ::= "a"', "grammar", Grammar("lark", '%llguidance {}\n\nstart: "a"\n')),
    "no_stop_trim": ("/v1/chat/completions", True, "stop", []),
}
KINDS = dict(zip(STREAMED, (ChatRequest, CompletionRequest, ResponseRequest, MessageRequest), strict=True))
LACKING = {name: [path for path, kind in KINDS.items() if name not in kind.__struct_fields__] for name in TABLE}
"""The generating endpoints that have no such field of their own."""


@pytest.mark.parametrize("path", BODIES)
def test_an_unknown_field_is_ignored_with_a_warning(
    http: httpx.Client, api: ApiProcess, leader: ScriptedLeader, path: str
) -> None:
    """Every API takes the request, names the field in a header and in one log line; without the field there is none."""
    response = http.post(path, json=BODIES[path] | {"colour": "red"})
    assert (response.status_code, response.headers.get("warning")) == (200, HEADER), response.text
    lines = [line for line in api.lines if line.get("action") == "request_warned" and line["path"] == path]
    assert [line["warnings"] for line in lines] == [["Unknown fields were ignored: colour."]]
    assert "warning" not in http.post(path, json=BODIES[path]).headers


@pytest.mark.parametrize("path", STREAMED)
def test_a_stream_has_the_warning(http: httpx.Client, leader: ScriptedLeader, path: str) -> None:
    """So has a stream, one that is joined by its Idempotency-Key, and one that is resumed with the same body."""
    body, key = BODIES[path] | {"colour": "red", "stream": True}, {"idempotency-key": f"warned{path}"}
    first = http.post(path, json=body, headers=key)
    joined = http.post(path, json=body, headers=key)
    assert first.text.splitlines()[0].startswith("id: "), first.text
    resumed = http.post(path, json=body, headers={"last-event-id": first.text.splitlines()[0].removeprefix("id: ")})
    assert [each.headers.get("warning") for each in (first, joined, resumed)] == [HEADER] * 3


def test_a_refusal_has_the_warning_too(http: httpx.Client, leader: ScriptedLeader) -> None:
    """A name that was misspelt is often the reason for another error."""
    response = http.post("/v1/chat/completions", json=chat("x" * 10_000) | {"truncaton": "auto"})
    assert (response.status_code, "truncaton" in response.headers["warning"]) == (400, True)


def test_strict_refuses_an_unknown_field(server: Server, leader: ScriptedLeader, tmp_path: Path) -> None:
    """`--strict` answers 400 by name on every route; fields inside messages are ignored all the same."""
    with (
        running_api(server.url, tmp_path, "--strict") as strict,
        httpx.Client(base_url=strict.url, timeout=40) as http,
    ):
        for path, body in BODIES.items():
            response = http.post(path, json=body | {"colour": "red"})
            assert response.status_code == 400 and "colour" in response.json()["error"]["message"], path
        echoed = {"role": "user", "content": "x", "reasoning_details": []}
        assert http.post("/v1/chat/completions", json={"messages": [echoed]}).status_code == 200


@pytest.mark.parametrize("name", HINTS)
def test_a_hint_is_accepted_without_a_word(http: httpx.Client, leader: ScriptedLeader, name: str) -> None:
    """Text and null are taken by both older endpoints, and by the newer ones where the field is not their own."""
    for path, value in itertools.product(STREAMED, ("x", None)):
        if (path, name) == ("/v1/chat/completions", "prediction"):
            continue  # it has its own form there
        if name.startswith(("dry_", "dynatemp_", "xtc_")) and path in (*STREAMED[:2], "/v1/responses"):
            continue  # they are parameters there
        response = http.post(path, json=BODIES[path] | {name: value})
        assert (response.status_code, "warning" in response.headers) == (200, False), (path, response.text)


@pytest.mark.parametrize("name", BUDGET)
def test_another_name_of_the_thinking_budget(http: httpx.Client, leader: ScriptedLeader, name: str) -> None:
    """The value is read as the budget, out of its range too; this model's answers have no reasoning."""
    taken = http.post("/v1/chat/completions", json=chat("x") | {name: 3})
    assert (taken.status_code, "warning" in taken.headers) == (200, False), taken.text
    refused = http.post("/v1/chat/completions", json=chat("x") | {name: -2})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "thinking_token_budget")


@pytest.mark.parametrize("name", [name for name, row in TABLE.items() if isinstance(row, Alias) and name not in BUDGET])
def test_another_name_has_the_same_effect(http: httpx.Client, leader: ScriptedLeader, name: str) -> None:
    """The leader gets the value; null is not given, and two names with two values are a 400 that names both."""
    path, value, param, sent = RENAMED[name]
    body = {key: given for key, given in BODIES[path].items() if key != "max_tokens"} | {name: value}
    if path == "/v1/messages":
        body["max_tokens"] = 9
    response = http.post(path, json=body)
    assert (response.status_code, "warning" in response.headers) == (200, False), response.text
    assert getattr(leader.claimed[-1].params.sampling, param) == sent
    assert http.post(path, json=body | {name: None}).status_code == 200


def test_two_names_with_two_values(http: httpx.Client, leader: ScriptedLeader) -> None:
    """Which of them counts could only be guessed."""
    asked = chat("x") | {"repeat_penalty": 1.5, "repetition_penalty": 1.2}
    refused = http.post("/v1/chat/completions", json=asked).json()["error"]
    assert refused["param"] == "repeat_penalty" and "'repetition_penalty'" in refused["message"]
    assert http.post("/v1/chat/completions", json=asked | {"repetition_penalty": 1.5}).status_code == 200


@pytest.mark.parametrize(("name", "row"), REFUSED, ids=[name for name, _ in REFUSED])
def test_what_would_alter_the_answer_is_refused(
    http: httpx.Client, leader: ScriptedLeader, name: str, row: Unsupported
) -> None:
    """On each endpoint that lacks the field: a 400 that names it, and neutral values pass without a word."""
    for path in LACKING[name]:
        refused = http.post(path, json=BODIES[path] | {name: {"asks": "x"}})
        assert refused.status_code == 400 and f"'{name}'" in refused.json()["error"]["message"], path
        assert row.remedy in refused.json()["error"]["message"]
        assert leader.claimed == []
    path = LACKING[name][0]
    for value in (None, *row.neutral):
        passed = http.post(path, json=BODIES[path] | {name: value})
        assert (passed.status_code, "warning" in passed.headers) == (200, False), (value, passed.text)


def test_completions_and_messages_are_not_stored(http: httpx.Client, leader: ScriptedLeader) -> None:
    """`store` is warned of, where it asks for something."""
    for path in ("/v1/completions", "/v1/messages"):
        warned = http.post(path, json=BODIES[path] | {"store": True})
        assert (warned.status_code, "'store' has no effect" in warned.headers["warning"]) == (200, True)
        assert "warning" not in http.post(path, json=BODIES[path] | {"store": False}).headers


def test_values_as_at_their_servers(http: httpx.Client, leader: ScriptedLeader) -> None:
    """-1 is no limit, though the endpoint's own default is 16; an empty stop string stops nothing; top_k 0 is off."""
    body = {"prompt": "x", "max_tokens": -1, "stop": "", "top_k": 0}
    assert http.post("/v1/completions", json=body).status_code == 200
    sampling = leader.claimed[-1].params.sampling
    assert (sampling.max_tokens > 16, sampling.stop, sampling.top_k) == (True, [], 0)
    assert http.post("/v1/chat/completions", json=chat("x") | {"stop": ["", "ZZ"]}).status_code == 200
    assert leader.claimed[-1].params.sampling.stop == ["ZZ"]


def test_ids_and_continuous_usage(http: httpx.Client, leader: ScriptedLeader) -> None:
    """vLLM's fields over HTTP: each chunk with the counts so far, resumed with the same ones, and all ids."""
    options = {"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": False}
    body = chat("hello") | {"stream": True, "stream_options": options, "return_token_ids": True}
    events_read = list(events(http.post("/v1/chat/completions", json=body).text.splitlines()))
    chunks = [event for event in events_read if event.data and event.data["choices"]]
    prompt = leader.claimed[-1].params.prompt
    assert chunks[0].data["prompt_token_ids"] == prompt
    ids: list[int] = []
    for event in chunks:
        ids += event.data["choices"][0].get("token_ids", [])
        assert event.data["usage"]["completion_tokens"] == len(ids)
    last = next(event.data for event in events_read if event.data and not event.data["choices"])
    assert last["usage"]["completion_tokens"] == len(ids) and last["usage"]["prompt_tokens"] == len(prompt)
    rest = http.post("/v1/chat/completions", json=body, headers={"last-event-id": str(chunks[0].id)}).text
    again = [event for event in events(rest.splitlines()) if event.data and event.data["choices"]]
    assert again[-1].data == chunks[-1].data
    assert [one for event in again for one in event.data["choices"][0].get("token_ids", [])] == ids
    whole = http.post("/v1/chat/completions", json=chat("hello") | {"return_token_ids": True}).json()
    assert (whole["prompt_token_ids"], whole["choices"][0]["token_ids"]) == (prompt, ids)
