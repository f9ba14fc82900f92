"""Sealed reasoning and summaries come back from a client: in /v1/responses, through the official one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from control import keys
from control.redis.connection import connect
from tests.byte_model import byte_assets
from tests.integration.api.conftest import ApiProcess, running_api
from tests.leader import ScriptedLeader
from tests.servers import NEW, Server, serving
from tests.waiting import until

TEMPLATE = """\
{%- for message in messages %}{{- message.role + ': ' }}
{%- if message.reasoning_content %}{{- '<think>' + message.reasoning_content + '</think>' }}{% endif %}
{{- message.content + '\\n' }}{%- endfor %}"""
SUMMARY = "Asked about tea; decided on mint."
SUMMARISED = f"assistant: Summary of the conversation so far:\n{SUMMARY}\n"
TALK: list[Any] = [
    {"role": "user", "content": "Which tea?"},
    {"role": "assistant", "content": "Mint."},
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "content": "It grows here."},
]
Farm = tuple[Server, ScriptedLeader, ApiProcess]


@pytest.fixture(scope="module")
def farm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Farm]:
    with serving(NEW) as server:
        leader = ScriptedLeader(server.url, assets=byte_assets(chat_template=TEMPLATE))
        leader.start()
        with running_api(server.url, tmp_path_factory.mktemp("api")) as api:
            yield server, leader, api
        leader.stop()


@pytest.fixture
def leader(farm: Farm) -> ScriptedLeader:
    farm[1].reset()
    return farm[1]


@pytest.fixture
def gpt(farm: Farm) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{farm[2].url}/v1", api_key="secret", max_retries=0, timeout=60) as client:
        yield client


def summarises(prompt: str) -> str:
    return SUMMARY if "Write a summary of our conversation so far" in prompt else "Yes."


@pytest.mark.parametrize("options", [{}, {"summary": "auto"}])
def test_two_turns_with_sealed_reasoning(gpt: openai.OpenAI, leader: ScriptedLeader, options: Any) -> None:
    """As Codex sends them: nothing is stored, and the reasoning comes back without its text."""
    leader.reply = lambda _: "<think>Mint grows here.</think>Mint."
    request_body: Any = {
        "model": "tiny",
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "reasoning": options,
    }
    first = gpt.responses.create(input="Which tea?", **request_body)
    with gpt.responses.create(input="Which tea?", stream=True, **request_body) as stream:
        done: Any = [event for event in stream if event.type == "response.output_item.done"]
    assert [event.item.type for event in done] == ["reasoning", "message"]
    thoughts: Any = done[0].item
    assert "Mint" not in thoughts.encrypted_content and thoughts.encrypted_content == first.output[0].encrypted_content  # type: ignore[union-attr]
    sealed = {"type": "reasoning", "summary": [], "encrypted_content": thoughts.encrypted_content}
    items: Any = [{"role": "user", "content": "Which tea?"}, sealed, done[1].item.to_dict()]
    items.append({"role": "user", "content": "Why?"})
    gpt.responses.create(input=items, **request_body)
    assert "assistant: <think>Mint grows here.</think>Mint.\nuser: Why?" in leader.prompt()


def test_a_foreign_seal_does_not_end_a_conversation(farm: Farm, gpt: openai.OpenAI, leader: ScriptedLeader) -> None:
    """An item that OpenAI sealed, or the farm with a lost key, is left out; the header says so."""
    leader.reply = lambda _: "<think>Mint grows here.</think>Mint."
    first = gpt.responses.create(model="tiny", input="Which tea?", include=["reasoning.encrypted_content"])
    with connect(farm[0].url) as client:
        client.delete(keys.SEAL)
    thoughts: Any = {"type": "reasoning", "summary": [], "encrypted_content": first.output[0].encrypted_content}  # type: ignore[union-attr]
    foreign = {**thoughts, "encrypted_content": "gAAAAABo-not-ours=="}
    items: Any = [*TALK[:1], thoughts, foreign, *TALK[1:3]]
    raw = gpt.responses.with_raw_response.create(model="tiny", input=items)
    assert raw.parse().status == "completed" and "<think>" not in leader.prompt()
    assert "input[1].encrypted_content" in raw.headers["warning"]
    assert "input[2].encrypted_content" in raw.headers["warning"]


def test_a_compacted_conversation_goes_on(gpt: openai.OpenAI, leader: ScriptedLeader) -> None:
    """The model writes the summary; OpenAI's client sends the output back in place of the conversation."""
    leader.reply = summarises
    compacted = gpt.responses.compact(model="tiny", input=TALK, instructions="Be short.")
    assert leader.prompt().startswith("system: Be short.\nuser: Which tea?\nassistant: Mint.\nuser: Why?")
    assert compacted.object == "response.compaction" and compacted.usage.output_tokens > len(SUMMARY)
    assert [item.type for item in compacted.output] == ["message", "message", "compaction"]
    assert SUMMARY not in compacted.to_json(warnings=False)
    again: Any = [*(item.to_dict(warnings=False) for item in compacted.output), {"role": "user", "content": "Sure?"}]
    assert gpt.responses.create(model="tiny", input=again, store=False).output_text == "Yes."
    assert leader.prompt() == f"user: Which tea?\nuser: Why?\n{SUMMARISED}user: Sure?\n"


def test_a_conversation_beyond_the_context_is_compacted(gpt: openai.OpenAI, leader: ScriptedLeader) -> None:
    """The oldest turns are left out of the summary's prompt, and the long messages of the user are not kept."""
    leader.reply = summarises
    long: Any = [{"role": "user", "content": f"{turn}" * 3000} for turn in range(20)]
    turns = [item for asked in long for item in (asked, {"role": "assistant", "content": "Go on."})]
    compacted = gpt.responses.compact(model="tiny", input=turns)
    assert compacted.output[-1].type == "compaction" and len(compacted.output) < 12


def test_compaction_of_a_stored_conversation(gpt: openai.OpenAI, leader: ScriptedLeader) -> None:
    leader.reply = summarises
    first = gpt.responses.create(model="tiny", input=TALK[:3])
    compacted = gpt.responses.compact(model="tiny", previous_response_id=first.id)
    assert "user: Why?\nassistant: Yes.\nuser: Write a summary" in leader.prompt()
    assert [item.type for item in compacted.output] == ["message", "message", "compaction"]


def test_a_trigger_compacts_within_a_response(gpt: openai.OpenAI, leader: ScriptedLeader) -> None:
    """As Codex asks for it: the only item of the answer is the summary, and what follows goes on from there."""
    leader.reply = summarises
    triggered: Any = [*TALK, {"type": "compaction_trigger"}]
    with gpt.responses.create(model="tiny", input=triggered, stream=True) as stream:
        events = list(stream)
    assert [event.type.removeprefix("response.") for event in events] == [
        "created", "in_progress", "output_item.added", "compaction.compacting", "output_item.done", "completed",
    ]  # fmt: skip
    last: Any = events[-1]
    [item] = last.response.output
    assert item.type == "compaction" and SUMMARY not in last.response.to_json()
    gpt.responses.create(model="tiny", input="Sure?", previous_response_id=last.response.id)
    assert leader.prompt() == f"user: Which tea?\nuser: Why?\n{SUMMARISED}user: Sure?\n"
    assert gpt.responses.retrieve(last.response.id).output[0].to_dict() == item.to_dict()


def test_a_summary_is_shown_while_it_is_written(gpt: openai.OpenAI, leader: ScriptedLeader) -> None:
    """A response in the background that any process reads: what it has so far is sealed, too."""
    leader.reply = summarises
    leader.pause()
    triggered: Any = [*TALK, {"type": "compaction_trigger"}]
    begun = gpt.responses.create(model="tiny", input=triggered, background=True)
    leader.step(9)
    shown = until(lambda: gpt.responses.retrieve(begun.id).output)
    assert [item.type for item in shown] == ["compaction"]
    leader.resume()
    done = until(lambda: (completion := gpt.responses.retrieve(begun.id)).status == "completed" and completion)
    again: Any = [done.output[0].to_dict(), {"role": "user", "content": "Sure?"}]
    gpt.responses.create(model="tiny", input=again)
    assert leader.prompt() == f"{SUMMARISED}user: Sure?\n"


def test_a_summary_that_says_nothing_is_one(gpt: openai.OpenAI, leader: ScriptedLeader) -> None:
    leader.reply = lambda _: ""
    compacted = gpt.responses.compact(model="tiny", input=TALK)
    assert [item.type for item in compacted.output] == ["message", "message", "compaction"]


def test_a_compaction_without_input_is_refused(farm: Farm, leader: ScriptedLeader) -> None:
    answer = httpx.post(f"{farm[2].url}/v1/responses/compact", json={"model": "tiny"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")
    assert leader.claimed == []
