"""Captured requests of real clients are answered: sent with their default settings, to a scripted model;
captures/<client>.json.

Each file holds two turns and a tool call of one client, shortened, as `python -m ops.compat run` makes it send them:
`client` with its version, and `requests`, each with `path`, `body`, `headers` where they matter, what the model answers
(`says`, or `calls` with a tool's name and its arguments), `ends` where that is no stop, and `warning` where the answer
has that header.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tests.byte_model import byte_assets
from tests.integration.api.calling import TEMPLATE, called
from tests.integration.api.conftest import running_api
from tests.integration.api.sse import events
from tests.leader import ScriptedLeader
from tests.servers import NEW, serving

FILES = sorted((Path(__file__).parent / "captures").glob("*.json"))
CONTEXT = 1 << 17
Result = tuple[str, list[tuple[str, Any]], str]
"""Text, calls as names with arguments, and the end: `stop`, `calls` or `length`."""
ENDS = {"stop": "stop", "end_turn": "stop", "tool_calls": "calls", "tool_use": "calls", "length": "length"}


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ScriptedLeader, httpx.Client]]:
    with serving(NEW) as server:
        assets = byte_assets(chat_template=TEMPLATE, context_length=CONTEXT, kv_tokens=2 * CONTEXT)
        leader = ScriptedLeader(server.url, assets=assets)
        leader.start()
        with (
            running_api(server.url, tmp_path_factory.mktemp("api")) as api,
            httpx.Client(base_url=api.url, timeout=40) as http,
        ):
            yield leader, http
        leader.stop()


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_what_a_client_sends_is_answered(speaker: tuple[ScriptedLeader, httpx.Client], file: Path) -> None:
    """With 200, with the script's text or call in the shape of the path, and without a Warning that is not expected."""
    leader, http = speaker
    for request in msgspec.json.decode(file.read_bytes())["requests"]:
        says, calls = request.get("says", ""), request.get("calls", [])
        said = says + "".join(_call(call) for call in calls)
        leader.reply = lambda _, said=said: said
        body = request["body"] | {"model": "tiny"}
        answer = http.post(request["path"], json=body, headers=request.get("headers"))
        assert answer.status_code == 200, answer.text
        assert answer.headers.get("warning") == request.get("warning")
        read = READERS[request["path"].partition("?")[0].removeprefix("/v1")]
        assert read(answer, bool(body.get("stream"))) == (
            says,
            [tuple(call) for call in calls],
            request.get("ends", "calls" if calls else "stop"),
        )


def _call(call: list[Any]) -> str:
    return called(call[0], msgspec.json.encode(call[1]).decode())


def _chat(answer: httpx.Response, stream: bool) -> Result:
    if not stream:
        [choice] = answer.json()["choices"]
        message = choice["message"]
        calls = [call["function"] for call in message.get("tool_calls") or []]
        return _ended(message["content"] or "", calls, choice["finish_reason"])
    event_list = [event for event in events(answer.text.splitlines()) if event.comment is None]
    assert event_list[-1].done and len({event.data["id"] for event in event_list[:-1]}) == 1
    choices = [event.data["choices"][0] for event in event_list[:-1] if event.data["choices"]]
    assert choices[0]["delta"]["role"] == "assistant"
    calls: list[Any] = []
    for part in [part for choice in choices for part in choice["delta"].get("tool_calls") or []]:
        if part["index"] == len(calls):
            calls.append({"name": part["function"]["name"], "arguments": ""})
        calls[part["index"]]["arguments"] += part["function"].get("arguments") or ""
    [finish] = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    return _ended(text, calls, finish)


def _response(answer: httpx.Response, stream: bool) -> Result:
    response = answer.json() if not stream else None
    if stream:
        event_list = [event.data for event in events(answer.text.splitlines()) if event.comment is None]
        assert [event["sequence_number"] for event in event_list] == list(range(len(event_list)))
        assert event_list[0]["type"] == "response.created"
        response = event_list[-1]["response"]
        deltas = "".join(event["delta"] for event in event_list if event["type"] == "response.output_text.delta")
        assert deltas == "".join(_texts(response))
    calls = [item for item in response["output"] if item["type"] == "function_call"]
    finish = "length" if response["incomplete_details"] else "tool_calls" if calls else "stop"
    assert response["status"] == ("incomplete" if finish == "length" else "completed")
    return _ended("".join(_texts(response)), calls, finish)


def _texts(response: dict[str, Any]) -> list[str]:
    return [part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"]]


def _message(answer: httpx.Response, stream: bool) -> Result:
    if not stream:
        message = answer.json()
        blocks, stop = message["content"], message["stop_reason"]
    else:
        event_list = [event.data for event in events(answer.text.splitlines()) if event.comment is None]
        assert (event_list[0]["type"], event_list[-1]["type"]) == ("message_start", "message_stop")
        blocks = [event["content_block"] for event in event_list if event["type"] == "content_block_start"]
        for event in [event for event in event_list if event["type"] == "content_block_delta"]:
            block, delta = blocks[event["index"]], event["delta"]
            kind = "text" if delta["type"] == "text_delta" else "json"
            block[kind] = block.get(kind, "") + delta.get("text", "") + delta.get("partial_json", "")
        [stop] = [event["delta"]["stop_reason"] for event in event_list if event["type"] == "message_delta"]
    text = "".join(block["text"] for block in blocks if block["type"] == "text")
    used = [block for block in blocks if block["type"] == "tool_use"]
    calls = [{"name": block["name"], "arguments": block.get("json") or block["input"]} for block in used]
    return _ended(text, calls, stop)


def _ended(text: str, calls: list[Any], finish: str) -> Result:
    return text, [_parsed(call) for call in calls], ENDS[finish]


def _parsed(call: dict[str, Any]) -> tuple[str, Any]:
    arguments = call["arguments"]
    return call["name"], msgspec.json.decode(arguments) if isinstance(arguments, str) else arguments


def _completion(answer: httpx.Response, stream: bool) -> Result:
    assert stream
    event_list = [event for event in events(answer.text.splitlines()) if event.comment is None]
    assert event_list[-1].done
    [finish] = [
        choice["finish_reason"]
        for event in event_list[:-1]
        for choice in event.data["choices"]
        if choice["finish_reason"]
    ]
    return _ended("".join(event.text for event in event_list), [], finish)


READERS = {"/completions": _completion, "/chat/completions": _chat, "/responses": _response, "/messages": _message}
