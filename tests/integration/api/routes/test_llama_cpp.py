"""llama.cpp's own routes: /completion, /apply-template, /props, /slots, /tokenize, in the forms of its server."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from control.messages import Grammar
from control.redis.clients import SyncRedis
from tests.byte_model import CONTEXT, TEMPLATE, byte_tokenizer
from tests.integration.api.conftest import ApiProcess
from tests.integration.api.routes.conftest import make
from tests.leader import ScriptedLeader


def complete(http: httpx.Client, **fields: Any) -> httpx.Response:
    return http.post("/completion", json={"prompt": "ab", "n_predict": 8} | fields)


def parts_of(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]


def test_a_whole_answer(http: httpx.Client, leader: ScriptedLeader) -> None:
    """Text, counts, settings and times of llama.cpp's names; without a limit the answer ends by itself."""
    leader.reply = lambda prompt: "x\ny"
    answer = complete(http, seed=7, temperature=0.5, top_k=3, return_tokens=True).json()
    known = ("index", "content", "stop", "stop_type", "stopping_word", "has_new_line", "truncated", "model", "prompt")
    assert [answer[name] for name in known] == [0, "x\ny", True, "eos", "", True, False, "tiny", "ab"]
    assert byte_tokenizer().decode(answer["tokens"]) == "x\ny"
    assert (answer["tokens_evaluated"], answer["tokens_predicted"], answer["tokens_cached"]) == (3, 4, 7)
    timings = answer["timings"]
    assert (timings["prompt_n"] + timings["cache_n"], timings["predicted_n"]) == (3, 4)
    assert timings["prompt_ms"] >= 0 and timings["predicted_ms"] >= 0
    settings = answer["generation_settings"]
    assert [settings[name] for name in ("seed", "temperature", "top_k", "n_predict")] == [7, 0.5, 3, 8]
    assert complete(http).json()["tokens"] == []
    free = http.post("/completion", json={"prompt": "ab"}).json()
    assert free["generation_settings"]["n_predict"] == CONTEXT - 3 and free["stop_type"] == "eos"
    assert complete(http, n_predict=2).json()["stop_type"] == "limit"
    assert complete(http, n_predict=0).json()["content"] == ""
    word = complete(http, stop=["y"]).json()
    assert (word["content"], word["stop_type"], word["stopping_word"]) == ("x\n", "word", "y")


def test_a_stream(http: httpx.Client, leader: ScriptedLeader) -> None:
    """Parts with their token ids, then the last event with all else, without [DONE]; it can be resumed."""
    leader.reply = lambda prompt: "xyz"
    answer = complete(http, stream=True, n_probs=1, timings_per_token=True)
    *parts, last = parts_of(answer)
    assert "".join(part["content"] for part in parts) == "xyz"
    assert byte_tokenizer().decode([token for part in parts for token in part["tokens"]]) == "xyz"
    assert all(part["stop"] is False and "timings" in part for part in parts)
    scores = [score for part in parts for score in part["completion_probabilities"]]
    assert [score["token"] for score in scores][:3] == ["x", "y", "z"]
    assert scores[0]["bytes"] == [ord("x")] and scores[0]["id"] > 0 and len(scores[0]["top_logprobs"]) == 1
    assert last["stop"] and last["content"] == "" and last["generation_settings"]["n_probs"] == 1
    rid = answer.headers["x-request-id"]
    ids = [line[4:] for line in answer.text.splitlines() if line.startswith("id: ")]
    rest = parts_of(http.get(f"/v1/requests/{rid}/events", headers={"last-event-id": ids[0]}))
    assert "".join(part["content"] for part in [parts[0], *rest]) == "xyz"
    assert http.get(f"/v1/requests/{rid}").json()["endpoint"] == "completion"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/completions", {"prompt": ["ab", "ab"]}),
        ("/v1/responses", {"input": "x"}),
    ],
)
def test_timings_where_a_client_asks_for_them(
    http: httpx.Client, leader: ScriptedLeader, path: str, body: dict[str, Any]
) -> None:
    """Whole answers and each part of a stream, but for the one that opens it; without the field there are none."""
    leader.reply = lambda prompt: "xyz"
    assert "timings" not in http.post(path, json=body).text
    assert "timings" not in http.post(path, json=body | {"stream": True}).text
    answer = http.post(path, json=body | {"timings_per_token": True}).raise_for_status().json()
    tokens = 8 if isinstance(body.get("prompt"), list) else 4
    timings = answer["timings"]
    assert timings["predicted_n"] == tokens and timings["prompt_n"] + timings["cache_n"] > 0
    options = {} if path == "/v1/responses" else {"stream_options": {"include_usage": True}}
    streamed = http.post(path, json=body | {"stream": True, "timings_per_token": True} | options)
    parts = [one for one in streamed.text.splitlines() if one.startswith("data: {")]
    counts = [json.loads(one[6:])["timings"]["predicted_n"] for one in parts if "timings" in one]
    assert len(counts) >= 2 and counts[-1] == tokens and counts[0] > 0
    assert len(counts) < len(parts) or path == "/v1/completions"


def test_openai_s_client_passes_timings_on(client: openai.OpenAI, leader: ScriptedLeader) -> None:
    """As a member that its types don't name, of a whole answer, of chunks and of events."""
    leader.reply = lambda prompt: "xyz"
    request_body: Any = {"model": "tiny", "extra_body": {"timings_per_token": True}}
    answer = client.chat.completions.create(messages=[{"role": "user", "content": "x"}], **request_body)
    chunks = [*client.chat.completions.create(messages=[{"role": "user", "content": "x"}], stream=True, **request_body)]
    events = [*client.responses.create(input="x", stream=True, **request_body)]
    for one in (answer, chunks[-1], events[-1]):
        assert one.model_extra is not None and one.model_extra["timings"]["predicted_n"] == 4


def test_the_first_token_counts_in_no_rate(http: httpx.Client, leader: ScriptedLeader) -> None:
    """It comes with the prompt: an answer of one token has no rate, and one of four that of three."""
    one = complete(http, n_predict=1).json()["timings"]
    assert (one["predicted_n"], one["predicted_per_second"], one["predicted_per_token_ms"]) == (1, 0, 0)
    leader.reply = lambda prompt: "xyz"
    four = complete(http).json()["timings"]
    assert four["predicted_n"] == 4 and four["predicted_ms"] > 0
    assert four["predicted_per_second"] == pytest.approx(3000 / four["predicted_ms"])


def test_an_answer_that_fills_the_context_is_truncated(http: httpx.Client, leader: ScriptedLeader) -> None:
    """An end by the client's own limit is none by the context's."""
    leader.reply = lambda prompt: "x" * 2 * CONTEXT
    for limit, truncated in ((4, False), (-1, True), (CONTEXT, True), (CONTEXT - 3, False)):
        answer = complete(http, n_predict=limit).json()
        assert (answer["stop_type"], answer["truncated"]) == ("limit", truncated), limit
    leader.reply = lambda prompt: "x"
    assert complete(http, n_predict=-1).json()["truncated"] is False


def test_tokens_of_a_chat_are_counted(http: httpx.Client, leader: ScriptedLeader) -> None:
    """As many as the usage of the same body has; nothing reaches a leader."""
    body = {"messages": [{"role": "user", "content": "hello"}]}
    counted = http.post("/chat/completions/input_tokens", json=body).raise_for_status().json()
    assert leader.claimed == []
    usage = http.post("/v1/chat/completions", json=body).json()["usage"]
    assert counted == {"object": "response.input_tokens", "input_tokens": usage["prompt_tokens"]}
    assert http.post("/v1/chat/completions/input_tokens", json={"messages": []}).status_code == 400


def test_several_prompts_and_choices(http: httpx.Client, leader: ScriptedLeader) -> None:
    """Whole answers are a list; the last event of each choice has its own counts."""
    leader.reply = lambda prompt: prompt.removeprefix("<s>")
    answers = complete(http, prompt=["a", byte_tokenizer().encode("bcd").ids, {"prompt_string": "ef"}]).json()
    assert [(one["index"], one["content"], one["prompt"]) for one in answers] == [
        (0, "a", "a"),
        (1, "bcd", "bcd"),
        (2, "ef", "ef"),
    ]
    assert [one["tokens_evaluated"] for one in answers] == [2, 3, 3]
    lasts = [one for one in parts_of(complete(http, prompt=["a", "bc"], n_cmpl=2, stream=True)) if one["stop"]]
    assert sorted((one["index"], one["tokens_predicted"], one["prompt"]) for one in lasts) == [
        (0, 2, "a"),
        (1, 2, "a"),
        (2, 3, "bc"),
        (3, 3, "bc"),
    ]


def test_prompts_of_ids_and_texts(http: httpx.Client, leader: ScriptedLeader) -> None:
    """Each text is tokenised for itself; the beginning-of-sequence token comes in front of a text, not of ids."""
    bos, *ids = byte_tokenizer().encode("<s>ab").ids
    for prompt, tokens in (
        ([*ids, "cd", ids[0]], [*ids, *byte_tokenizer().encode("cda").ids]),
        (["cd", ids[0]], [bos, *byte_tokenizer().encode("cda").ids]),
    ):
        answer = complete(http, prompt=prompt).json()
        assert leader.claimed[-1].params.prompt == tokens and answer["tokens_evaluated"] == len(tokens)
    several = complete(http, prompt=[[ids[0], "cd"], "ef", ids]).json()
    assert [one["prompt"] for one in several] == ["acd", "ef", "ab"]


def test_only_some_fields(http: httpx.Client, leader: ScriptedLeader) -> None:
    """`response_fields` names them by paths; those that are not there are left out."""
    fields = ["content", "generation_settings/n_predict", "prompt", "timings/none", "content/x"]
    answer = complete(http, response_fields=fields).json()
    assert answer.keys() == {"content", "generation_settings/n_predict", "prompt"}
    assert answer["generation_settings/n_predict"] == 8
    last = parts_of(complete(http, response_fields=["stop"], stream=True))[-1]
    assert last == {"stop": True}


def test_what_reaches_the_leader(http: httpx.Client, leader: ScriptedLeader) -> None:
    """Biases of ids and texts in each form, grammars, samplers and penalties."""
    ids = byte_tokenizer().encode("hi").ids
    for biases in ([[5, 1.5], ["hi", False]], {"5": 1.5, "hi": False}):
        assert complete(http, logit_bias=biases).status_code == 200
        assert leader.claimed[-1].params.sampling.logit_bias == {5: 1.5, **dict.fromkeys(ids, -100.0)}
    complete(http, grammar='root ::= "a"', repeat_penalty=1.5, mirostat=0, id_slot=2, cache_prompt=False, top_n_sigma=2)
    sampling = leader.claimed[-1].params.sampling
    assert isinstance(sampling.grammar, Grammar) and sampling.grammar.kind == "lark"
    assert (sampling.repetition_penalty, sampling.top_n_sigma) == (1.5, 2)
    complete(http, json_schema={"type": "object"}, n_probs=3)
    sampling = leader.claimed[-1].params.sampling
    assert sampling.grammar is not None and sampling.grammar.kind == "json_schema" and sampling.logprobs == 3


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, [2, "a"]]}, "prompt"),
        ({"prompt": [5, "a" * 20 * CONTEXT]}, "prompt"),
        ({"prompt": [["a", 10**6]]}, "prompt"),
        ({"prompt": [[""]]}, "prompt"),
        ({"prompt": {"prompt_string": "x", "multimodal_data": ["AA=="]}}, "prompt.multimodal_data"),
        ({"n_predict": -3}, "n_predict"),
        ({"n_probs": 21}, "n_probs"),
        ({"logit_bias": [[1]]}, "logit_bias"),
        ({"logit_bias": [[1, True]]}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": [["x" * 5, 1], ["y", 2]] * 3000}, "logit_bias"),
        ({"post_sampling_probs": True}, "post_sampling_probs"),
        ({"response_fields": ["x"] * 65}, "response_fields"),
        ({"mirostat": 2}, "mirostat"),
        ({"model": "none"}, "model"),
    ],
)
def test_refusals_name_the_field(
    http: httpx.Client, leader: ScriptedLeader, fields: dict[str, Any], param: str
) -> None:
    """In the client's own names, before anything reaches a leader."""
    answer = complete(http, **fields)
    assert answer.status_code in (400, 404) and answer.json()["error"]["param"] == param, answer.text
    assert leader.claimed == []


def test_a_template_is_applied(http: httpx.Client, leader: ScriptedLeader) -> None:
    """As to a chat with the same body; a template's error is the client's."""
    body = {"messages": [{"role": "user", "content": "x"}]}
    assert http.post("/apply-template", json=body).json() == {"prompt": "<s>user: x\n"}
    assert http.post("/apply-template", json={"messages": []}).status_code == 400
    refused = http.post("/apply-template", json={"messages": [{"role": "user", "content": "forbidden"}]})
    assert refused.status_code == 422
    assert leader.claimed == []


def test_props(http: httpx.Client, leader: ScriptedLeader) -> None:
    """The context, the template and the defaults of the only model, or of the one that is named."""
    props = http.get("/props").raise_for_status().json()
    defaults = props["default_generation_settings"]
    assert (defaults["n_ctx"], defaults["params"]["n_predict"], props["total_slots"]) == (CONTEXT, -1, 10)
    assert (props["model_alias"], props["chat_template"], props["bos_token"]) == ("tiny", TEMPLATE, "<s>")
    assert props["modalities"] == {"vision": False, "audio": False} and not props["is_sleeping"]
    assert http.get("/props?model=none").status_code == 404
    assert http.post("/props", json={}).status_code == 405


def test_tokens_in_llama_cpp_s_form(http: httpx.Client, leader: ScriptedLeader) -> None:
    """`content` begins with no special token unless that is asked for; pieces of a character are bytes."""
    ids = byte_tokenizer().encode("aé").ids
    assert http.post("/tokenize", json={"content": "aé"}).json()["tokens"] == ids
    assert len(http.post("/tokenize", json={"content": "aé", "add_special": True}).json()["tokens"]) == 4
    pieces = http.post("/tokenize", json={"content": "aé", "with_pieces": True}).json()["tokens"]
    assert [one["piece"] for one in pieces] == ["a", [0xC3], [0xA9]] and [one["id"] for one in pieces] == ids
    assert http.post("/detokenize", json={"tokens": ids}).json()["content"] == "aé"
    assert http.post("/tokenize", json={"content": "a", "prompt": "a"}).status_code == 400


def test_the_routes_ask_for_a_key_and_keep_to_it(
    guarded: ApiProcess, leader: ScriptedLeader, redis_client: SyncRedis
) -> None:
    """401 without one; a key that opens other models finds none; /slots shows its tenant's requests alone."""
    bodies: dict[str, Any] = {
        "/completion": {"prompt": "x"},
        "/apply-template": {"messages": [{"role": "user", "content": "x"}]},
        "/embedding": {"content": "x"},
        "/embed": {"inputs": "x"},
        "/reranking": {"query": "x", "documents": ["y"]},
    }
    with httpx.Client(base_url=guarded.url, timeout=40) as http:
        for path, body in bodies.items():
            assert http.post(path, json=body).status_code == 401, path
        for path in ("/props", "/slots"):
            assert http.get(path).status_code == 401, path
        other = {"authorization": f"Bearer {make(redis_client, models=['other'])}"}
        for path, body in bodies.items():
            assert http.post(path, json=body | {"model": "tiny"}, headers=other).status_code == 404, path
        for path in ("/props", "/slots"):
            assert http.get(f"{path}?model=tiny", headers=other).status_code == 404, path
        mine = {"authorization": f"Bearer {make(redis_client, tenant='mine')}"}
        theirs = {"authorization": f"Bearer {make(redis_client, tenant='theirs')}"}
        leader.pause()
        with http.stream("POST", "/completion", json={"prompt": "x", "stream": True}, headers=mine):
            slots = http.get("/slots", headers=mine).json()
            assert [slot["is_processing"] for slot in slots] == [True] + [False] * 9
            assert slots[0]["n_ctx"] == CONTEXT and slots[0]["n_prompt_tokens"] == 2
            assert not any(slot["is_processing"] for slot in http.get("/slots", headers=theirs).json())
        leader.resume()
