"""Tools of coding agents in /v1/responses: offered, called, answered, and continued through the official client."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.byte_model import byte_assets
from tests.integration.api.calling import TEMPLATE, called
from tests.integration.api.conftest import ApiProcess, running_api
from tests.leader import ScriptedLeader
from tests.servers import NEW, serving

FUNCTION: Any = {"type": "function", "name": "plan", "parameters": {"type": "object", "properties": {}}}
GRAMMAR: Any = {"type": "grammar", "syntax": "lark", "definition": 'start: "x"+'}
NAMESPACE: Any = {"type": "namespace", "name": "mcp__mail", "description": "Mail.", "tools": [FUNCTION]}
HOSTED: list[Any] = [{"type": "web_search", "external_web_access": True}, {"type": "image_generation"}]
TOOLS: list[Any] = [
    FUNCTION,
    {"type": "custom", "name": "patch", "format": GRAMMAR},
    NAMESPACE,
    {"type": "local_shell"},
    {"type": "shell"},
    {"type": "apply_patch"},
    *HOSTED,
]
PATCH = '*** Begin "Patch"\n+ é 😀\n'
SAID: dict[str, tuple[str, str]] = {
    "custom_tool_call": ("patch", json.dumps({"input": PATCH})),
    "function_call": ("mcp__mail__plan", '{"a": 1}'),
    "local_shell_call": ("local_shell", '{"command": ["ls", "-l"], "working_directory": "/tmp"}'),
    "shell_call": ("shell", '{"commands": ["pwd", "ls"], "timeout_ms": 500}'),
    "apply_patch_call": ("apply_patch", '{"type": "update_file", "path": "x.py", "diff": "+a"}'),
}
FACTS: dict[str, dict[str, Any]] = {
    "custom_tool_call": {"name": "patch", "input": PATCH},
    "function_call": {"name": "plan", "namespace": "mcp__mail", "arguments": '{"a": 1}'},
    "local_shell_call": {
        "action": {"type": "exec", "command": ["ls", "-l"], "env": {}, "timeout_ms": None, "user": None,
                   "working_directory": "/tmp"}
    },
    "shell_call": {
        "action": {"commands": ["pwd", "ls"], "timeout_ms": 500, "max_output_length": None},
        "environment": {"type": "local"},
    },
    "apply_patch_call": {"operation": {"type": "update_file", "path": "x.py", "diff": "+a"}},
}  # fmt: skip
OUTPUTS: dict[str, Any] = {
    "custom_tool_call": "patched",
    "function_call": "planned",
    "local_shell_call": "total 0",
    "shell_call": [{"stdout": "/", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}],
    "apply_patch_call": "patched",
}
EVENTS = {
    "custom_tool_call": ["custom_tool_call_input.delta", "custom_tool_call_input.done"],
    "function_call": ["function_call_arguments.delta", "function_call_arguments.done"],
    "local_shell_call": [],
    "shell_call": [f"shell_call_command.{part}" for _ in range(2) for part in ("added", "delta", "done")],
    "apply_patch_call": [],
}


@pytest.fixture(scope="module")
def leading(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ScriptedLeader, ApiProcess]]:
    with serving(NEW) as server:
        leader = ScriptedLeader(server.url, assets=byte_assets(chat_template=TEMPLATE, context_length=16_384))
        leader.start()
        with running_api(server.url, tmp_path_factory.mktemp("api")) as api:
            yield leader, api
        leader.stop()


@pytest.fixture
def leader(leading: tuple[ScriptedLeader, ApiProcess]) -> ScriptedLeader:
    leading[0].reset()
    return leading[0]


@pytest.fixture
def gpt(leading: tuple[ScriptedLeader, ApiProcess]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{leading[1].url}/v1", api_key="secret", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def http(leading: tuple[ScriptedLeader, ApiProcess]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=leading[1].url, timeout=60) as client:
        yield client


def result(kind: str, call_id: str) -> dict[str, Any]:
    """The result with which an agent answers a call."""
    told = {"type": f"{kind}_output", "output": OUTPUTS[kind]}
    match kind:
        case "local_shell_call":
            return told | {"id": call_id}
        case "apply_patch_call":
            return told | {"call_id": call_id, "status": "completed"}
        case _:
            return told | {"call_id": call_id}


@pytest.mark.parametrize("kind", SAID)
def test_a_call_is_an_item_of_its_tools_kind(gpt: openai.OpenAI, leader: ScriptedLeader, kind: str) -> None:
    """Whole and streamed alike; the tool's result goes back by the stored response, or with the items themselves."""
    leader.reply = lambda _: called(*SAID[kind])
    whole = gpt.responses.create(model="tiny", input="go", tools=TOOLS)
    [item] = whole.output
    item_fields = item.to_dict()
    assert item_fields["type"] == kind and {name: item_fields[name] for name in FACTS[kind]} == FACTS[kind]
    with gpt.responses.create(model="tiny", input="go", tools=TOOLS, stream=True) as stream:
        events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [key.removeprefix("response.") for key, _ in itertools.groupby(event.type for event in events)]
    assert kinds == ["created", "in_progress", "output_item.added", *EVENTS[kind], "output_item.done", "completed"]
    last: Any = events[-1]
    [streamed] = last.response.output
    same = FACTS[kind] | {"type": kind, "status": "completed"}
    assert {name: streamed.to_dict()[name] for name in same} == same
    done: Any = next(event for event in events if event.type == "response.output_item.done")
    assert done.item.to_dict() == streamed.to_dict()
    assert gpt.responses.retrieve(last.response.id).output[0].to_dict() == streamed.to_dict()

    leader.reply = lambda _: "All done."
    answer: Any = result(kind, streamed.call_id)
    by_id = gpt.responses.create(model="tiny", input=[answer], previous_response_id=last.response.id, tools=TOOLS)
    prompt = leader.prompt()
    history: Any = [{"role": "user", "content": "go"}, streamed.to_dict(), answer]
    by_items = gpt.responses.create(model="tiny", input=history, tools=TOOLS, store=False)
    assert by_id.output_text == by_items.output_text == "All done." and leader.prompt() == prompt
    assert f'<tool_call>{{"name": "{SAID[kind][0]}", "arguments": ' in prompt
    assert prompt.count("<tool_response>") == 1


def test_the_deltas_of_a_custom_call_are_its_text(gpt: openai.OpenAI, leader: ScriptedLeader) -> None:
    leader.reply = lambda _: called(*SAID["custom_tool_call"])
    with gpt.responses.create(model="tiny", input="go", tools=TOOLS, stream=True) as stream:
        events = list(stream)
    deltas = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
    [done] = [event for event in events if event.type == "response.custom_tool_call_input.done"]
    assert "".join(deltas) == done.input == PATCH and len(deltas) > 10


def test_a_stream_of_calls_resumes_anywhere(http: httpx.Client, leader: ScriptedLeader) -> None:
    """The rest after any event is what an unbroken stream had: items and numbers follow from the log alone."""
    leader.reply = lambda _: "\n".join(called(*SAID[kind]) for kind in SAID)
    body = {"model": "tiny", "input": "go", "tools": TOOLS, "stream": True}
    blocks = http.post("/v1/responses", json=body).text.strip().split("\n\n")
    for cut in (0, 3, len(blocks) // 2, len(blocks) - 2):
        identity = next(line for line in blocks[cut].splitlines() if line.startswith("id: ")).removeprefix("id: ")
        rest = http.post("/v1/responses", json=body, headers={"Last-Event-ID": identity}).text.strip().split("\n\n")
        same = [[line for line in block.splitlines() if not line.startswith("data: ")] for block in rest]
        assert same == [[line for line in block.splitlines() if line[:6] != "data: "] for block in blocks[cut + 1 :]]
        assert [json.loads(block.split("data: ", 1)[1])["type"] for block in rest] == [
            json.loads(block.split("data: ", 1)[1])["type"] for block in blocks[cut + 1 :]
        ]


def test_what_is_offered_and_what_is_not(http: httpx.Client, leader: ScriptedLeader) -> None:
    """The model sees functions; hosted tools are named in a warning, and are not among the response's tools."""
    answer = http.post("/v1/responses", json={"model": "tiny", "input": "go", "tools": TOOLS})
    offered = leader.prompt().partition("<tools>")[2].partition("</tools>")[0].splitlines()
    assert [json.loads(line)["function"]["name"] for line in offered if line] == [
        "plan", "patch", "mcp__mail__plan", "local_shell", "shell", "apply_patch",
    ]  # fmt: skip
    assert "'tools[6]' has type 'web_search'" in answer.headers["warning"]
    assert "format" not in answer.headers["warning"]
    assert [tool["type"] for tool in answer.json()["tools"]] == [tool["type"] for tool in TOOLS[:-2]]


def test_only_hosted_tools_are_no_tools(http: httpx.Client, leader: ScriptedLeader) -> None:
    answer = http.post("/v1/responses", json={"model": "tiny", "input": "go", "tools": HOSTED, "tool_choice": "auto"})
    assert answer.status_code == 200 and "<tools>" not in leader.prompt()
    refused = http.post(
        "/v1/responses", json={"model": "tiny", "input": "go", "tools": HOSTED, "tool_choice": HOSTED[0]}
    )
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tool_choice")


@pytest.mark.parametrize(
    "choice, name",
    [
        ({"type": "apply_patch"}, "apply_patch"),
        ({"type": "local_shell"}, "local_shell"),
        ({"type": "function", "name": "plan", "namespace": "mcp__mail"}, "mcp__mail__plan"),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "shell"}, HOSTED[0]]}, "shell"),
    ],
)
def test_a_demanded_call_is_of_the_tool(http: httpx.Client, leader: ScriptedLeader, choice: Any, name: str) -> None:
    """The grammar of the answer allows the call of that tool alone."""
    body = {"model": "tiny", "input": "go", "tools": TOOLS, "tool_choice": choice}
    assert http.post("/v1/responses", json=body).status_code == 200
    grammar = leader.claimed[-1].params.sampling.grammar
    assert grammar is not None and f'\\"name\\": \\"{name}\\"' in grammar.text
    assert grammar.text.count("\nname") == 0 and grammar.text.count('\\"name\\"') == 1


@pytest.mark.parametrize(
    "syntax, definition", [("lark", "start: ("), ("regex", "("), ("regex", "\\"), ("regex", "\n/")]
)
def test_a_bad_grammar_is_no_failure(http: httpx.Client, leader: ScriptedLeader, syntax: str, definition: str) -> None:
    """It is a 400 where a call is demanded and its grammar is read; else it is text for the model."""
    form = {"type": "grammar", "syntax": syntax, "definition": definition}
    body = {"model": "tiny", "input": "go", "tools": [{"type": "custom", "name": "patch", "format": form}]}
    assert http.post("/v1/responses", json=body).status_code == 200
    demanded = http.post("/v1/responses", json=body | {"tool_choice": "required"})
    assert demanded.status_code in (200, 400) and (demanded.status_code == 200 or demanded.json()["error"]["param"])


def test_a_grammar_that_is_not_enforced_is_named(http: httpx.Client, leader: ScriptedLeader) -> None:
    """A recursive one, where calls are JSON: it is no regular expression of the escaped text."""
    form = {"type": "grammar", "syntax": "lark", "definition": 'start: "(" start? ")"'}
    body = {"model": "tiny", "input": "go", "tools": [{"type": "custom", "name": "patch", "format": form}]}
    answer = http.post("/v1/responses", json=body)
    assert "'tools[0].format' is told to this model, but can't be enforced" in answer.headers["warning"]
