"""The tokenizer's routes give a request's tokens: in vLLM's shape."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.byte_model import BOS, CONTEXT, EOS, TEMPLATE
from tests.integration.api.sse import chat
from tests.leader import ScriptedLeader


@pytest.mark.parametrize("root", ["", "/v1"])
def test_detokenize_is_the_inverse_of_tokenize(http: httpx.Client, leader: ScriptedLeader, root: str) -> None:
    """A text and its tokens, counted, named and made a text again."""
    answer = http.post(f"{root}/tokenize", json={"model": "tiny", "prompt": "aé", "return_token_strs": True}).json()
    bos = leader.tokenizer.token_to_id(BOS)
    assert answer == {
        "count": 4,
        "max_model_len": CONTEXT,
        "tokens": [bos, *leader.tokenizer.encode("aé", add_special_tokens=False).ids],
        "token_strs": [BOS, "a", "Ã", "©"],
    }
    back = http.post(f"{root}/detokenize", json={"tokens": answer["tokens"]})
    assert (back.status_code, back.json()) == (200, {"prompt": f"{BOS}aé", "content": f"{BOS}aé"})


def test_tokens_of_messages_are_those_of_the_chat(http: httpx.Client, leader: ScriptedLeader) -> None:
    """Messages have the tokens that a chat with them sends to the worker."""
    body = chat("hello")
    assert http.post("/v1/chat/completions", json=body).status_code == 200
    answer = http.post("/tokenize", json=body).json()
    assert answer["tokens"] == leader.claimed[0].params.prompt
    assert answer["token_strs"] is None


def test_add_special_tokens_false_leaves_the_text_alone(http: httpx.Client, leader: ScriptedLeader) -> None:
    """add_special_tokens: false leaves the text alone, here and in a completion."""
    fields = {"prompt": "ab", "add_special_tokens": False}
    tokens = http.post("/tokenize", json=fields).json()["tokens"]
    assert tokens == leader.tokenizer.encode("ab", add_special_tokens=False).ids
    http.post("/v1/completions", json=fields)
    assert leader.claimed[0].params.prompt == tokens
    assert http.post("/tokenize", json=fields | {"prompt": ""}).json()["tokens"] == []
    assert http.post("/tokenize", json={"prompt": ""}).json()["count"] == 1


@pytest.mark.parametrize("path", ["/tokenizer_info", "/v1/tokenizer_info?model=tiny"])
def test_what_the_tokenizer_is(http: httpx.Client, path: str) -> None:
    """The author's configuration, with special tokens as text, and the template."""
    info = http.get(path).json()
    assert (info["bos_token"], info["eos_token"], info["chat_template"]) == (BOS, EOS, TEMPLATE)
    assert info["tokenizer_class"] and info["max_model_len"] == CONTEXT


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]},
            "tools[0].function",
        ),
        ("/tokenize", {"prompt": "ab " * 20 * CONTEXT}, "prompt"),
        ("/detokenize", {"tokens": [99999]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [1] * (CONTEXT + 1)}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ],
)
def test_a_wrong_tokenize_request_is_a_400_that_names_the_field(
    http: httpx.Client, path: str, fields: dict[str, Any], param: str
) -> None:
    """An unknown field, a prompt that is too long, or an id that does not exist."""
    response = http.post(path, json=fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


def test_a_model_that_is_not_there(http: httpx.Client) -> None:
    """As everywhere: 404 with what is served."""
    for response in (http.post("/tokenize", json={"model": "x", "prompt": "a"}), http.get("/tokenizer_info?model=x")):
        assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
