"""Fields of vLLM, llama.cpp and Hugging Face reach a leader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from control.messages import Sampling
from tests.byte_model import CONTEXT, byte_tokenizer
from tests.integration.api.conftest import running_api
from tests.integration.api.sse import chat
from tests.leader import ScriptedLeader
from tests.servers import Server

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SAMPLERS: dict[str, Any] = {
    "dry_multiplier": 0.8,
    "dry_base": 1.5,
    "dry_allowed_length": 3,
    "dry_penalty_last_n": 64,
    "dry_sequence_breakers": ["\n", "x"],
    "xtc_probability": 0.5,
    "xtc_threshold": 0.2,
    "top_n_sigma": 1.5,
    "dynatemp_range": 0.4,
    "dynatemp_exponent": 2.0,
}


def sampling_of(leader: ScriptedLeader) -> Sampling:
    return leader.claimed[-1].params.sampling


def prompt_of(leader: ScriptedLeader) -> str:
    return byte_tokenizer().decode(leader.claimed[-1].params.prompt, skip_special_tokens=False)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/responses", "/v1/messages"])
def test_the_samplers_of_llama_cpp(http: httpx.Client, leader: ScriptedLeader, path: str) -> None:
    """Each number reaches the leader as it was sent; without a multiplier no breakers travel."""
    body = {
        CHAT: chat("x"),
        COMPLETIONS: {"prompt": "x"},
        "/v1/responses": {"input": "x", "store": False},
        "/v1/messages": chat("x", max_tokens=9),
    }[path]
    assert http.post(path, json=body | SAMPLERS | {"temperature": 5}).status_code == 200
    sampling = sampling_of(leader)
    assert {name: getattr(sampling, name) for name in SAMPLERS} == SAMPLERS
    assert sampling.temperature == 5
    assert http.post(path, json=body | {"dry_sequence_breakers": ["x"], "top_n_sigma": -1}).status_code == 200
    assert sampling_of(leader).dry_sequence_breakers == [] and sampling_of(leader).top_n_sigma == 0
    assert http.post(path, json=body | {"dry_multiplier": 1}).status_code == 200
    assert sampling_of(leader).dry_sequence_breakers == ["\n", ":", '"', "*"]


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_the_samplers_of_llama_cpp_among_ollama_s_options(
    http: httpx.Client, leader: ScriptedLeader, path: str
) -> None:
    """Each reaches the leader; one out of its range is refused in the client's own name."""
    body = {"/api/chat": chat("x", stream=False), "/api/generate": {"prompt": "x", "stream": False}}[path]
    assert http.post(path, json=body | {"options": SAMPLERS}).status_code == 200
    sampling = sampling_of(leader)
    assert {name: getattr(sampling, name) for name in SAMPLERS} == SAMPLERS
    refused = http.post(path, json=body | {"options": {"xtc_probability": 1.5}})
    assert refused.status_code == 400 and "'options.xtc_probability'" in refused.json()["error"]


def test_allowed_tokens(http: httpx.Client, leader: ScriptedLeader) -> None:
    """Each once, in order."""
    assert http.post(CHAT, json=chat("x") | {"allowed_token_ids": [7, 5, 7]}).status_code == 200
    assert sampling_of(leader).allowed_token_ids == [5, 7]


def test_a_truncated_prompt(http: httpx.Client, leader: ScriptedLeader) -> None:
    """Its last tokens stay, and the beginning-of-sequence token in front of them; `echo` shows what stayed."""
    body = {"prompt": "abcdef", "max_tokens": 1}
    assert http.post(COMPLETIONS, json=body | {"truncate_prompt_tokens": 3}).status_code == 200
    assert prompt_of(leader) == "<s>ef"
    assert http.post(COMPLETIONS, json=body | {"truncate_prompt_tokens": 7}).status_code == 200
    assert prompt_of(leader) == "<s>abcdef"
    ids = body | {"prompt": byte_tokenizer().encode("abcdef").ids, "truncate_prompt_tokens": 2}
    assert http.post(COMPLETIONS, json=ids).status_code == 200
    assert prompt_of(leader) == "ef"
    echoed = http.post(COMPLETIONS, json=body | {"truncate_prompt_tokens": 3, "echo": True}).json()
    assert echoed["choices"][0]["text"] == "efy"
    assert http.post(CHAT, json=chat("abcdef") | {"truncate_prompt_tokens": 4}).status_code == 200
    assert prompt_of(leader) == "<s>ef\n"


def test_a_prompt_truncated_to_the_context(http: httpx.Client, leader: ScriptedLeader) -> None:
    """-1 leaves room for the answer, whatever length the text has; without it such a prompt is refused."""
    long = {"prompt": "y" * 20 * CONTEXT + "z", "max_tokens": 10}
    assert http.post(COMPLETIONS, json=long).status_code == 400
    assert http.post(COMPLETIONS, json=long | {"truncate_prompt_tokens": -1}).status_code == 200
    assert len(leader.claimed[-1].params.prompt) == CONTEXT - 10
    assert prompt_of(leader).endswith("yz")
    gap = http.post(COMPLETIONS, json=long | {"truncate_prompt_tokens": -1, "suffix": "x"})
    assert (gap.status_code, gap.json()["error"]["param"]) == (400, "truncate_prompt_tokens")


def test_all_log_probabilities_are_the_most_that_are_shown(
    http: httpx.Client, leader: ScriptedLeader, server: Server, tmp_path: Path
) -> None:
    """-1 is vLLM's word for the whole vocabulary: twenty come, with a warning, and with --strict none."""
    answer = http.post(CHAT, json=chat("x") | {"logprobs": True, "top_logprobs": -1})
    assert answer.status_code == 200 and "top_logprobs" in answer.headers["warning"]
    assert sampling_of(leader).logprobs == 20
    answer = http.post(COMPLETIONS, json={"prompt": "x", "prompt_logprobs": -1, "max_tokens": 1})
    assert answer.status_code == 200 and "prompt_logprobs" in answer.headers["warning"]
    assert sampling_of(leader).prompt_logprobs == 20
    with running_api(server.url, tmp_path, "--strict") as strict, httpx.Client(base_url=strict.url) as refusing:
        refused = refusing.post(CHAT, json=chat("x") | {"logprobs": True, "top_logprobs": -1})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "top_logprobs")


def test_a_role_of_the_template_s_own(http: httpx.Client, leader: ScriptedLeader) -> None:
    """It reaches the template as it is."""
    messages = [{"role": "narrator", "content": "Night."}, {"role": "user", "content": "x"}]
    assert http.post(CHAT, json={"messages": messages}).status_code == 200
    assert prompt_of(leader) == "<s>narrator: Night.\nuser: x\n"


def test_the_prefix_of_servers_with_several_apis(api: Any, http: httpx.Client, leader: ScriptedLeader) -> None:
    """`/openai/v1` is `/v1` for OpenAI's client; no other path has it."""
    with openai.OpenAI(base_url=f"{api.url}/openai/v1", api_key="x", max_retries=0) as client:
        assert client.models.list().data[0].id == "tiny"
        answer = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}])
        assert answer.choices[0].message.content
    assert http.get("/openai/v1/api/tags").status_code == 200
    assert http.get("/openai/models").status_code == 404
    assert http.get("/openai/farm").status_code == 404


def test_compact_needs_a_model(http: httpx.Client, leader: ScriptedLeader) -> None:
    """As in OpenAI's API, although there is one model only."""
    refused = http.post("/v1/responses/compact", json={"input": "x"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")


@pytest.mark.parametrize(
    ("path", "body", "headers", "error"),
    [
        ("/v1/models/none", None, {}, {"error": {"code": "model_not_found", "param": "model"}}),
        ("/v1/models/org/none", None, {}, {"error": {"code": "model_not_found", "param": "model"}}),
        ("/v1/models/none", None, {"anthropic-version": "1"}, {"type": "error", "error": {"type": "not_found_error"}}),
        ("/api/delete", {"model": "none"}, {}, {"error": "The model 'none' does not exist. Models served here: tiny."}),
        ("/v1/responses/resp_0", None, {}, {"error": {"code": "response_not_found"}}),
    ],
)
def test_what_is_not_there_can_t_be_deleted(
    http: httpx.Client, leader: ScriptedLeader, path: str, body: Any, headers: dict[str, str], error: dict[str, Any]
) -> None:
    """A 404 in the dialect of the route."""
    answer = http.request("DELETE", path, json=body, headers=headers)
    assert answer.status_code == 404, answer.text

    def holds(part: Any, expected: Any) -> bool:
        if not isinstance(expected, dict):
            return part == expected
        return isinstance(part, dict) and all(holds(part.get(name), value) for name, value in expected.items())

    assert holds(answer.json(), error), answer.text
