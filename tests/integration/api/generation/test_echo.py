"""Prompts are echoed with log probabilities: echo and prompt_logprobs, in whole answers and in streams that are
resumed."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from ops.harness.scripted_leader import PROMPT_TOKENS, scripted_score
from tests.byte_model import BOS
from tests.integration.api.sse import Event, read_all
from tests.leader import ScriptedLeader

COMPLETIONS = "/v1/completions"
PROMPT = "naïve 1"
SAID = "é!"


@pytest.fixture(autouse=True)
def script(leader: ScriptedLeader) -> None:
    leader.reply = lambda prompt: SAID


def ids(leader: ScriptedLeader, text: str = PROMPT) -> list[int]:
    return [leader.tokenizer.token_to_id(BOS), *leader.tokenizer.encode(text, add_special_tokens=False).ids]


def test_echo_puts_the_prompt_in_front_without_the_worker(client: openai.OpenAI, leader: ScriptedLeader) -> None:
    """The text comes back in front of every answer, and the worker is asked for nothing more."""
    answer = client.completions.create(model="tiny", prompt=[PROMPT, "b"], n=2, echo=True)
    assert [choice.text for choice in answer.choices] == [PROMPT + SAID] * 2 + ["b" + SAID] * 2
    assert all(request.params.sampling.prompt_logprobs is None for request in leader.claimed)
    stream = client.completions.create(model="tiny", prompt=[PROMPT, "b"], echo=True, stream=True)
    texts = ["", ""]
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [PROMPT + SAID, "b" + SAID]


@pytest.mark.parametrize("as_ids", [False, True])
def test_echo_with_logprobs_scores_prompt_and_answer(
    client: openai.OpenAI, leader: ScriptedLeader, as_ids: bool
) -> None:
    """Every token of prompt and answer with its place in the text; the first one has no value."""
    prompt = ids(leader)
    answer = client.completions.create(
        model="tiny", prompt=prompt if as_ids else PROMPT, echo=True, logprobs=2, n=2, max_tokens=3
    )
    shown = (BOS if as_ids else "") + PROMPT
    for choice in answer.choices:
        assert choice.text == shown + SAID
        logprobs = choice.logprobs
        assert logprobs is not None and logprobs.tokens and logprobs.text_offset
        assert logprobs.token_logprobs and logprobs.top_logprobs
        assert logprobs.token_logprobs[: len(prompt)] == [
            scripted_score(prompt, place, 0).logprob for place in range(len(prompt))
        ]
        assert logprobs.token_logprobs[len(prompt) :] == [-0.5] * 3
        assert logprobs.top_logprobs[0] is None
        assert [len(top) for top in logprobs.top_logprobs[1:]] == [2] * (len(prompt) + 2)
        assert logprobs.text_offset == sorted(logprobs.text_offset)
        for token, start in zip(logprobs.tokens, logprobs.text_offset, strict=True):
            assert token.startswith("bytes:") or choice.text.startswith(token, start) or token == BOS
        assert logprobs.text_offset[-1] == len(shown) + 1
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), 6)


def test_the_ending_token_has_its_entry(client: openai.OpenAI, leader: ScriptedLeader) -> None:
    """A client that scores asks for one token and drops the last entry, also where that token only ends the answer."""
    leader.reply = lambda prompt: ""
    for echo in (True, False):
        answer = client.completions.create(model="tiny", prompt=PROMPT, echo=echo, logprobs=0, max_tokens=1)
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == (PROMPT * echo, "stop")
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None and logprobs.token_logprobs is not None and logprobs.text_offset is not None
        assert len(logprobs.token_logprobs) == (len(ids(leader)) + 1) * echo
        assert logprobs.text_offset[-1:] == [len(PROMPT)] * echo


def test_max_tokens_of_zero_scores_the_prompt_alone(client: openai.OpenAI, leader: ScriptedLeader) -> None:
    """With max_tokens 0 the answer is the prompt: what evaluation harnesses ask for."""
    prompts = [ids(leader, "one"), ids(leader, "two or more")]
    answer = client.completions.create(
        model="tiny", prompt=prompts, echo=True, logprobs=1, max_tokens=0, temperature=0, seed=1
    )
    for prompt, choice in zip(prompts, answer.choices, strict=True):
        assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
        assert len(choice.logprobs.token_logprobs) == len(prompt)
        assert (choice.finish_reason, choice.text) == ("length", leader.tokenizer.decode(prompt, False))
    assert answer.usage is not None and answer.usage.completion_tokens == 0


def merged(event_list: list[Event]) -> list[Any]:
    """The events of two choices as a client reads them: texts, tokens with their values, ends."""
    seen: list[Any] = [["", [], None], ["", [], None]]
    for event in event_list:
        for choice in (event.data or {}).get("choices", []):
            mine = seen[choice["index"]]
            mine[0] += choice["text"]
            logprobs = choice["logprobs"] or {"tokens": [], "token_logprobs": [], "text_offset": []}
            mine[1] += zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["text_offset"], strict=True)
            mine[2] = choice["finish_reason"] or mine[2]
    return seen


@pytest.mark.parametrize("fields", [{}, {"logprobs": 1}, {"logprobs": 1, "max_tokens": 0}])
def test_a_stream_and_its_resumes(http: httpx.Client, leader: ScriptedLeader, fields: dict[str, Any]) -> None:
    """A stream says what the whole answer says, and from every event on the rest is exactly what was not sent."""
    body = {"model": "tiny", "prompt": PROMPT, "echo": True, "n": 2, **fields}
    whole = http.post(COMPLETIONS, json=body).json()
    with http.stream("POST", COMPLETIONS, json=body | {"stream": True}) as response:
        events = read_all(response)
    texts, tokens, ends = zip(*merged(events), strict=True)
    assert [choice["text"] for choice in whole["choices"]] == list(texts)
    assert [choice["finish_reason"] for choice in whole["choices"]] == list(ends)
    if fields:
        assert [token[2] for token in tokens[0]] == whole["choices"][0]["logprobs"]["text_offset"]
    rid = events[0].data["id"].removeprefix("cmpl-")
    for place, event in enumerate(events):
        rest = http.get(f"/v1/requests/{rid}/events", headers={"last-event-id": str(event.id)})
        assert merged(events[: place + 1] + read_all(rest)) == merged(events), event.id


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/chat/completions"])
def test_prompt_logprobs_have_the_form_of_vllm(http: httpx.Client, leader: ScriptedLeader, path: str) -> None:
    """vLLM's form: by token id, with rank and text; the first token has none."""
    request_body = {"prompt": PROMPT} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "x"}]}
    answer = http.post(path, json={"model": "tiny", "prompt_logprobs": 1, "max_tokens": 0, **request_body}).json()
    prompt = leader.claimed[0].params.prompt
    told = answer["choices"][0]["prompt_logprobs"] if path == COMPLETIONS else answer["prompt_logprobs"]
    assert len(told) == len(prompt) > PROMPT_TOKENS and told[0] is None
    token, other = prompt[1], prompt[1] ^ 1
    assert told[1].keys() == {str(token), str(other)}
    assert told[1][str(token)]["logprob"] == -1.125 and told[1][str(token)]["rank"] == 2
    assert told[1][str(other)] == {
        "logprob": -0.125,
        "rank": 1,
        "decoded_token": leader.tokenizer.decode([other], False),
    }


def test_tokens_as_ids_have_unique_names(client: openai.OpenAI, leader: ScriptedLeader) -> None:
    """With return_tokens_as_token_ids every token has a name that is its own."""
    answer = client.completions.create(
        model="tiny", prompt="x", logprobs=0, extra_body={"return_tokens_as_token_ids": True}
    )
    logprobs = answer.choices[0].logprobs
    said = [*leader.tokenizer.encode(SAID, add_special_tokens=False).ids]
    assert logprobs is not None and logprobs.tokens == [f"token_id:{token}" for token in said]
    assert logprobs.top_logprobs == [{name: -0.5} for name in logprobs.tokens], "its own, with no other one wanted"


def test_what_ends_an_answer_is_shown(client: openai.OpenAI, leader: ScriptedLeader) -> None:
    """include_stop_str_in_output leaves the stop string, skip_special_tokens: false the special tokens."""
    leader.reply = lambda prompt: "so it ENDs here"
    answer = client.completions.create(
        model="tiny", prompt="x", stop="END", extra_body={"include_stop_str_in_output": True}
    )
    assert answer.choices[0].text == "so it END"
    leader.reply = lambda prompt: f"a{BOS}b"
    answer = client.completions.create(model="tiny", prompt="x", extra_body={"skip_special_tokens": False})
    assert answer.choices[0].text == f"a{BOS}b"
