"""Ollama's bodies become the farm's requests."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
import pytest

from api.schemas.chat import ChatRequest
from api.schemas.converted import Converted
from api.schemas.decoding import Warnings
from api.schemas.ollama import (
    GenerateRequest,
    OllamaChatRequest,
    OllamaInputs,
    RawPrompt,
    chat_of,
    decode_text_request,
    embed_of,
    embeddings_of,
    generation_of,
)
from control.errors import RequestError

ASK: list[Any] = [{"role": "user", "content": "x"}]


def chat(**fields: Any) -> Converted:
    body = msgspec.json.encode({"model": "m", "messages": ASK} | fields)
    warnings = Warnings()
    return chat_of(decode_text_request(body, OllamaChatRequest, warnings), warnings)


def generation(has_template: bool = True, **fields: Any) -> Converted | RawPrompt:
    body = msgspec.json.encode({"model": "m", "prompt": "x"} | fields)
    warnings = Warnings()
    request = decode_text_request(body, GenerateRequest, warnings)
    return generation_of(request, has_template=has_template, warnings=warnings)


def call(name: str, identity: str | None = None) -> dict[str, Any]:
    made: dict[str, Any] = {"function": {"name": name, "arguments": {"a": 1}}}
    return made if identity is None else {**made, "id": identity}


@pytest.mark.parametrize(
    ("calls", "results", "expected"),
    [
        ([call("f"), call("g")], [{}, {}], [0, 1]),
        ([call("f"), call("g")], [{"tool_name": "g"}, {"tool_name": "f"}], [1, 0]),
        ([call("f"), call("f")], [{"tool_name": "f"}, {"tool_name": "f"}], [0, 1]),
        ([call("f", "a"), call("g", "b")], [{"tool_call_id": "b"}, {}], [1, 0]),
        ([call("f")], [{"tool_name": "g"}, {}], [None, 0]),
        ([], [{}], [None]),
    ],
)
def test_results_find_their_calls(
    calls: list[dict[str, Any]], results: list[dict[str, Any]], expected: list[int | None]
) -> None:
    """By id, by the tool's name, or in order; each call has one result, and a result without a call an id of its
    own."""
    said = [{"role": "assistant", "tool_calls": calls}] if calls else []
    told = [{"role": "tool", "content": "r"} | result for result in results]
    messages = chat(messages=[*ASK, *said, *told]).messages
    ids = [one.id for one in (messages[1].tool_calls or [])] if calls else []
    call_ids = [message.tool_call_id for message in messages if message.role == "tool"]
    assert [ids.index(one) if one in ids else None for one in call_ids] == expected  # type: ignore[arg-type]
    assert len({*ids, *call_ids}) == len(ids) + expected.count(None)


def test_a_later_turn_does_not_take_the_ids_of_an_earlier_one() -> None:
    """Each turn's calls are answered by the results that follow them."""
    turn = [{"role": "assistant", "tool_calls": [call("f")]}, {"role": "tool", "content": "r"}]
    messages = chat(messages=[*ASK, *turn, *turn]).messages
    pairs = [(messages[at].tool_calls[0].id, messages[at + 1].tool_call_id) for at in (1, 3)]  # type: ignore[index]
    assert all(made == answered for made, answered in pairs) and len(set(pairs)) == 2


def test_images_stand_before_the_text_under_the_names_of_the_body() -> None:
    """In base64, with or without its type in front; nothing else becomes a URL that could be fetched."""
    request = chat(messages=[{"role": "user", "content": "x", "images": ["AAAA", "data:image/png;base64,BBBB"]}])
    content = request.messages[0].content
    assert isinstance(content, list)
    urls = [part.image_url["url"] for part in content[:2]]
    assert urls == ["data:;base64,AAAA", "data:image/png;base64,BBBB"] and content[2].text == "x"
    assert request.names["messages[0].content[1].image_url"] == "messages[0].images[1]"
    prompted = generation(images=["http://127.0.0.1/x.png"])
    assert isinstance(prompted, Converted) and isinstance(prompted.messages[0].content, list)
    assert prompted.messages[0].content[0].image_url["url"].startswith("data:;base64,http")
    assert prompted.names["messages[0].content[0].image_url"] == "images[0]"


def test_think_is_a_switch_or_an_effort() -> None:
    """False also leaves out what a model without a switch thinks."""
    said = {
        think: (one.thinks, one.reasoning_effort, one.include_reasoning)
        for think in (None, True, False, "low")
        if (one := chat(think=think))
    }
    assert said == {
        None: (None, None, None),
        True: (True, None, None),
        False: (False, None, False),
        "low": (None, "low", None),
    }


def test_a_prompt_is_raw_where_no_template_is_to_be_used() -> None:
    """With `raw`, with a gap, and for a model without a template; it has no limit of 16 tokens."""
    assert isinstance(generation(), Converted)
    for raw in (generation(raw=True), generation(suffix="y"), generation(has_template=False, think=True)):
        assert isinstance(raw, RawPrompt) and raw.token_limit is None and raw.stream
    gap = generation(suffix="y", options={"num_predict": 5})
    assert isinstance(gap, RawPrompt) and (gap.suffix, gap.token_limit, gap.has_gap) == ("y", 5, True)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"options": {"top_p": 2}}, "options.top_p"),
        ({"options": {"num_predict": 2**31}}, "options.num_predict"),
        ({"options": {"stop": "x" * 2_000}}, "options.stop"),
        ({"options": {"mirostat": 1}}, "options.mirostat"),
        ({"options": {"tfs_z": 0.5}}, "options.tfs_z"),
        ({"options": {"temperature": "hot"}}, "options.temperature"),
        ({"timeout": 0}, "timeout"),
        ({"model": "m" * 600}, "model"),
    ],
)
def test_a_refusal_has_the_name_of_the_body(fields: dict[str, Any], param: str) -> None:
    """Not that of the chat or the completion that it becomes."""
    for convert in (chat, generation, partial(generation, raw=True)):
        with pytest.raises(RequestError) as refused:
            convert(**fields)
        assert refused.value.param is not None and refused.value.param.startswith(param), refused.value


def test_inputs_of_vectors() -> None:
    """Texts, or one; without any there is nothing to compute. Options for samplers have no effect."""
    warnings = Warnings()
    some = embed_of(b'{"model": "m", "input": ["a", "b"], "options": {"num_ctx": 8, "seed": 1}}', warnings)
    assert isinstance(some, OllamaInputs) and some.inputs == ["a", "b"] and not some.stream
    one = embeddings_of(b'{"model": "m", "prompt": "a"}', warnings)
    assert isinstance(one, OllamaInputs) and one.inputs == ["a"]
    for body in (b'{"model": "m"}', b'{"model": "m", "input": []}', b'{"model": "m", "input": ""}'):
        assert not isinstance(embed_of(body, warnings), OllamaInputs)
    assert not isinstance(embeddings_of(b'{"model": "m", "prompt": ""}', warnings), OllamaInputs)
    assert embed_of(b'{"model": "m", "input": "a", "truncate": true}', warnings)
    assert any("'truncate' has no effect" in text for text in warnings.texts)
    with pytest.raises(RequestError, match="'dimensions' is 0"):
        embed_of(b'{"model": "m", "input": "a", "dimensions": 0}', warnings)


def test_the_chat_is_a_chat() -> None:
    """Its endpoint is known, and it is streamed unless that is switched off."""
    request = chat()
    assert isinstance(request, ChatRequest) and (request.endpoint, request.stream) == ("ollama_chat", True)
    assert chat(stream=False).stream is False
