"""`context_management` of /v1/messages clears parts of the prompt; and the answer says which."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.integration.api.calling import leader_with_tools
from tests.integration.api.conftest import ApiProcess
from tests.integration.api.messages import HELLO, WEATHER, send
from tests.leader import ScriptedLeader
from tests.servers import Server


@pytest.fixture(scope="module")
def leader_of_module(server: Server) -> Iterator[ScriptedLeader]:
    with leader_with_tools(server) as leader:
        yield leader


def uses(count: int) -> list[Any]:
    """A conversation with so many uses of a tool, each after some thought."""
    messages = list(HELLO)
    for index in range(count):
        use = {"type": "tool_use", "id": f"t{index}", "name": "get_weather", "input": {"city": f"c{index}"}}
        messages.append({"role": "assistant", "content": [{"type": "thinking", "thinking": f"so{index}"}, use]})
        messages.append(
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": f"t{index}", "content": f"r{index}" * 60}],
            }
        )
    return messages


CLEAR = {"type": "clear_tool_uses_20250919", "trigger": {"type": "tool_uses", "value": 2}}
NOTE = "[The result of this call was cleared to save context.]"


def test_old_results_are_cleared_and_reported(http: httpx.Client, leader: ScriptedLeader) -> None:
    """The newest stay; the numbers are those of the prompts with and without; streams and counts agree."""
    request_body = {"messages": uses(5), "tools": [WEATHER]}
    counts = "/v1/messages/count_tokens"
    original = http.post(counts, json={"model": "tiny", **request_body}).json()
    assert set(original) == {"input_tokens"}
    management = {"edits": [CLEAR | {"keep": {"type": "tool_uses", "value": 2}}]}
    answer = send(http, **request_body, context_management=management).json()
    left = len(leader.claimed[-1].params.prompt)
    [applied] = answer["context_management"]["applied_edits"]
    assert applied == {
        "type": "clear_tool_uses_20250919",
        "cleared_tool_uses": 3,
        "cleared_input_tokens": original["input_tokens"] - left,
    }
    shown = leader.prompt()
    assert shown.count(NOTE) == 3 and "r2r2" not in shown and "r3r3" in shown and '"c0"' in shown
    counted = http.post(counts, json={"model": "tiny", **request_body, "context_management": management}).json()
    assert counted == {
        "input_tokens": left,
        "context_management": {"original_input_tokens": original["input_tokens"]},
    }
    with http.stream(
        "POST",
        "/v1/messages",
        json={"model": "tiny", "max_tokens": 9, "stream": True, **request_body, "context_management": management},
    ) as response:
        lines = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: ")]
    [end] = [line for line in lines if line["type"] == "message_delta"]
    assert end["context_management"] == answer["context_management"]


@pytest.mark.parametrize(
    ("edit", "cleared"),
    [
        (CLEAR, 2),
        ({"type": CLEAR["type"]}, 0),
        (CLEAR | {"trigger": {"type": "input_tokens", "value": 10}}, 2),
        (CLEAR | {"trigger": {"type": "tool_uses", "value": 5}}, 0),
        (CLEAR | {"exclude_tools": ["get_weather"]}, 0),
        (CLEAR | {"clear_at_least": {"type": "input_tokens", "value": 100_000}}, 0),
        (CLEAR | {"keep": {"type": "tool_uses", "value": 0}}, 5),
        (CLEAR | {"keep": {"type": "tool_uses", "value": -3}}, 5),
    ],
)
def test_when_results_are_cleared(http: httpx.Client, leader: ScriptedLeader, edit: Any, cleared: int) -> None:
    """Anthropic's rules: a trigger, a number that stays, tools that are spared, a least number of tokens."""
    answer = send(http, messages=uses(5), tools=[WEATHER], context_management={"edits": [edit]}).json()
    assert sum(one["cleared_tool_uses"] for one in answer["context_management"]["applied_edits"]) == cleared
    assert leader.prompt().count(NOTE) == cleared


def test_inputs_and_thoughts_are_cleared_too(http: httpx.Client, leader: ScriptedLeader) -> None:
    """Arguments where it is asked for; of thoughts all but the newest turns' go; `all` keeps them."""
    edit = CLEAR | {"clear_tool_inputs": True}
    send(http, messages=uses(5), tools=[WEATHER], context_management={"edits": [edit]})
    assert '"c1"' not in leader.prompt() and '"c2"' in leader.prompt()
    thinking = {"type": "clear_thinking_20251015"}
    turns = [*uses(1), {"role": "assistant", "content": "a"}, *uses(1), *uses(1)]
    for keep, cleared in ((None, 2), ({"type": "thinking_turns", "value": 2}, 1), ("all", 0), ({"type": "all"}, 0)):
        edits = [thinking | ({"keep": keep} if keep else {})]
        answer = send(http, messages=turns, context_management={"edits": edits}).json()
        applied = answer["context_management"]["applied_edits"]
        assert sum(one["cleared_thinking_turns"] for one in applied) == cleared


def test_other_edits_are_accepted_with_a_warning(http: httpx.Client, leader: ScriptedLeader) -> None:
    """Less context is asked for, not another answer; a wrong type is a 400."""
    response = send(http, context_management={"edits": [{"type": "compact_20260112", "trigger": None}]})
    assert response.json()["context_management"] == {"applied_edits": []}
    assert "compact_20260112" in response.headers["warning"]
    refused = send(http, context_management={"edits": [{"type": 5}]})
    assert refused.status_code == 400 and "context_management.edits[0].type" in refused.json()["error"]["message"]


def test_their_beta_client_reads_the_edits(api: ApiProcess, leader: ScriptedLeader) -> None:
    """Through the official client, whole and streamed, with its own header."""
    anthropic = pytest.importorskip("anthropic", reason="the anthropic package is not installed")
    request_body: Any = {"model": "tiny", "max_tokens": 50, "messages": uses(4), "tools": [WEATHER]}
    request_body |= {"context_management": {"edits": [CLEAR]}, "betas": ["context-management-2025-06-27"]}
    with anthropic.Anthropic(base_url=api.url, api_key="secret", max_retries=0, timeout=40) as client:
        whole = client.beta.messages.create(**request_body)
        with client.beta.messages.stream(**request_body) as stream:
            streamed = stream.get_final_message()
    for message in (whole, streamed):
        assert [edit.cleared_tool_uses for edit in message.context_management.applied_edits] == [1]
