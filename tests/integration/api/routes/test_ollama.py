"""/api/chat and /api/generate of Ollama: bodies reach the leader, and clients get lines of JSON with real counts."""

from __future__ import annotations

import datetime
import itertools
import time
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from control.keys import ModelKeys
from control.redis.clients import SyncRedis
from tests.byte_model import byte_assets
from tests.integration.api.calling import TEMPLATE, WEATHER, called
from tests.integration.api.conftest import ApiProcess, running_api
from tests.integration.api.ollama import HELLO, chat, content_of, generate, lines_of
from tests.integration.api.routes.conftest import make
from tests.leader import ScriptedLeader
from tests.servers import Server
from tests.waiting import until

DURATIONS = ("load_duration", "prompt_eval_duration", "eval_duration")


def test_a_conversation_comes_as_lines(http: httpx.Client, leader: ScriptedLeader) -> None:
    """Without `stream` an answer is streamed; the last line has the counts, and durations that add up."""
    leader.cached = 3
    began = time.time_ns()
    response = chat(http)
    took = time.time_ns() - began
    assert response.headers["content-type"] == "application/x-ndjson"
    lines = lines_of(response)
    assert content_of(lines) == "you said hello"
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    assert {line["model"] for line in lines} == {"tiny"}
    assert {line["message"]["role"] for line in lines} == {"assistant"}
    assert all("eval_count" not in line and "done_reason" not in line for line in lines[:-1])
    last = lines[-1]
    assert (last["done_reason"], last["message"]["content"]) == ("stop", "")
    assert last["prompt_eval_count"] == len(leader.claimed[0].params.prompt)
    assert last["eval_count"] == len("you said hello") + 1
    assert 0 < last["total_duration"] <= took + 1_000_000  # the request's moment is known in milliseconds
    assert sum(last[name] for name in DURATIONS) == last["total_duration"]
    assert all(last[name] >= 0 for name in DURATIONS)
    moments = [datetime.datetime.fromisoformat(line["created_at"]) for line in lines]
    assert moments == sorted(moments) and abs(moments[-1].timestamp() - time.time()) < 60


def test_eval_duration_is_the_time_after_the_first_token(http: httpx.Client, leader: ScriptedLeader) -> None:
    """An answer that pauses after its first token is evaluated for so long."""
    leader.pause()
    with http.stream("POST", "/api/chat", json={"model": "tiny", "messages": HELLO}) as response:
        leader.step()
        reader = response.iter_lines()
        first = msgspec.json.decode(next(reader))
        at = time.monotonic()
        until(lambda: time.monotonic() - at > 0.2)
        leader.resume()
        last = [msgspec.json.decode(line) for line in reader][-1]
    assert first["message"]["content"] and not first["done"]
    assert last["eval_duration"] > 150_000_000


def test_one_body(http: httpx.Client, leader: ScriptedLeader) -> None:
    """`stream: false`: the same fields in one object, a stop string and a limit as reasons of the end."""
    answer = chat(http, stream=False).raise_for_status()
    whole = answer.json()
    assert answer.headers["content-type"] == "application/json"
    assert (whole["message"], whole["done"], whole["done_reason"]) == (
        {"role": "assistant", "content": "you said hello"},
        True,
        "stop",
    )
    assert whole["eval_count"] == len("you said hello") + 1
    assert sum(whole[name] for name in DURATIONS) == whole["total_duration"] > 0
    cut = chat(http, stream=False, options={"num_predict": 3}).json()
    assert (cut["message"]["content"], cut["done_reason"], cut["eval_count"]) == ("you", "length", 3)
    stopped = chat(http, stream=False, options={"stop": [" said"]}).json()
    assert (stopped["message"]["content"], stopped["done_reason"]) == ("you", "stop")


def test_a_prompt_is_one_question(http: httpx.Client, leader: ScriptedLeader) -> None:
    """/api/generate puts it into the model's template, after a system message if there is one; with `raw` it does
    not."""
    lines = lines_of(generate(http, system="Be short."))
    assert "".join(line["response"] for line in lines) == "you said hello"
    assert leader.prompt() == "system: Be short.\nuser: hello\n"
    assert all("message" not in line for line in lines)
    assert lines[-1]["eval_count"] == len("you said hello") + 1
    leader.reply = lambda prompt: f"{prompt}!"
    whole = generate(http, raw=True, stream=False, options={"num_predict": 99}).json()
    assert (whole["response"], leader.prompt()) == ("hello!", "hello")


def test_options_reach_the_leader(http: httpx.Client, leader: ScriptedLeader) -> None:
    """Under Ollama's names; a `num_predict` below 1 is no limit; how its server would run a model has no effect."""
    options = {
        "temperature": 0.25,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.125,
        "typical_p": 0.75,
        "seed": 11,
        "repeat_penalty": 1.25,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "stop": "ZZ",
        "num_gpu": 99,
        "num_thread": 8,
        "use_mmap": True,
        "mirostat": 0,
    }
    for send in (chat, generate):
        response = send(http, options=options | {"num_predict": 40}, keep_alive="5m").raise_for_status()
        assert "warning" not in response.headers
        sampling = leader.claimed[-1].params.sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.25, 0.5, 7, 0.125)
        assert (sampling.typical_p, sampling.seed, sampling.repetition_penalty) == (0.75, "11", 1.25)
        assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.stop) == (0.5, -0.5, ["ZZ"])
        assert sampling.max_tokens == 40
    for unlimited in (-1, -2, 0):
        chat(http, options={"num_predict": unlimited}).raise_for_status()
        claimed = leader.claimed[-1].params
        assert claimed.sampling.max_tokens == leader.assets.context_length - len(claimed.prompt)


def test_what_has_no_effect_is_told(http: httpx.Client, leader: ScriptedLeader) -> None:
    """A warning names it, as on other endpoints; what would alter the answer is refused by name."""
    warned = chat(http, options={"num_ctx": 8192, "colour": 1}, shape=2).raise_for_status().headers["warning"]
    assert "'num_ctx' has no effect" in warned and "colour" in warned and "shape" in warned
    leader.claimed.clear()
    for fields, named in (
        ({"options": {"mirostat": 2}}, "'options.mirostat'"),
        ({"options": {"temperature": 6}}, "'options.temperature'"),
        ({"options": {"num_predict": "x"}}, "'options.num_predict'"),
        ({"options": {"repeat_penalty": 0}}, "'options.repeat_penalty'"),
        ({"options": {"stop": ["x"] * 99}}, "'options.stop'"),
        ({"think": "loudly"}, "'think'"),
        ({"format": "xml"}, "'format'"),
        ({"format": {"type": "nonsense"}}, "'format'"),
        ({"top_logprobs": 3}, "'top_logprobs'"),
    ):
        refused = chat(http, **fields)
        assert refused.status_code == 400 and named in refused.json()["error"], (fields, refused.text)
    for fields, named in (
        ({"context": [1, 2]}, "'context'"),
        ({"template": "{{ .Prompt }}"}, "'template'"),
        ({"suffix": "x"}, "'suffix'"),
        ({"raw": True, "system": "x"}, "'system'"),
        ({"raw": True, "images": ["aGk="]}, "'images'"),
        ({"prompt": "x" * 5000}, "context"),
    ):
        refused = generate(http, **fields)
        assert refused.status_code == 400 and named in refused.json()["error"], (fields, refused.text)
    assert leader.claimed == []


def test_a_form_of_the_answer(http: httpx.Client, leader: ScriptedLeader) -> None:
    """`json` and a schema reach the leader as grammars; an empty text asks for nothing."""
    schema = {"type": "object", "properties": {"name": {"type": "string"}}}
    for send, (form, kind) in itertools.product(
        (chat, generate), (("json", "json_object"), (schema, "json_schema"), ("", None))
    ):
        send(http, format=form).raise_for_status()
        grammar = leader.claimed[-1].params.sampling.grammar
        assert (grammar.kind if grammar is not None else None) == kind


def test_log_probabilities_are_those_of_the_tokens(http: httpx.Client, leader: ScriptedLeader) -> None:
    """Of streams and of whole answers, with as many alternatives as were asked for."""
    for send in (chat, generate):
        streamed = lines_of(send(http, logprobs=True, top_logprobs=2))
        scores = [score for line in streamed for score in line.get("logprobs", [])]
        assert "".join(score["token"] for score in scores) == "you said hello"
        assert {len(score["top_logprobs"]) for score in scores} == {2}
        assert send(http, logprobs=True, top_logprobs=2, stream=False).json()["logprobs"] == scores
    assert all("top_logprobs" not in score for score in chat(http, logprobs=True, stream=False).json()["logprobs"])
    assert "logprobs" not in chat(http, stream=False).json()


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/api/chat", {}, "message"),
        ("/api/chat", {"messages": [], "keep_alive": 0}, "message"),
        ("/api/generate", {"prompt": ""}, "response"),
        ("/api/generate", {"keep_alive": -1}, "response"),
    ],
)
def test_without_a_prompt_a_model_is_only_asked_to_be_ready(
    http: httpx.Client, leader: ScriptedLeader, path: str, body: dict[str, Any], field: str
) -> None:
    """It answers at once that it is loaded, and generates nothing; one that is not there is a 404."""
    answer = http.post(path, json={"model": "tiny", **body}).raise_for_status().json()
    assert (answer["done"], answer["done_reason"], answer["model"]) == (True, "load", "tiny")
    assert answer[field] in ("", {"role": "assistant", "content": ""})
    assert leader.claimed == []
    assert http.post(path, json={"model": "absent", **body}).status_code == 404


# --- reasoning and tools ---


@pytest.fixture
def caller(server: Server, leader: ScriptedLeader) -> Iterator[ScriptedLeader]:
    """A model with tools and reasoning beside the other one."""
    caller = ScriptedLeader(server.url, "caller", byte_assets(chat_template=TEMPLATE))
    caller.start()
    yield caller
    caller.stop()


def test_reasoning_has_a_field_of_its_own(http: httpx.Client, caller: ScriptedLeader) -> None:
    """`thinking`, in lines and in one body; `think: false` switches it off in the template and shows none."""
    caller.reply = lambda _: "<think>a word</think>Fine."
    lines = lines_of(chat(http, model="caller"))
    assert "".join(line["message"].get("thinking", "") for line in lines) == "a word"
    assert content_of(lines) == "Fine."
    whole = generate(http, model="caller", think=True, stream=False).json()
    assert (whole["thinking"], whole["response"]) == ("a word", "Fine.")
    silent = chat(http, model="caller", think=False, stream=False).json()
    assert "thinking" not in silent["message"]
    assert caller.prompt().endswith("<think>\n\n</think>\n\n")


def test_calls_have_objects_as_arguments(http: httpx.Client, caller: ScriptedLeader) -> None:
    """Each call comes whole, in a stream too, however its tokens come; the end is a stop."""
    calls = called("get_weather", '{"city": "Paris", "days": 2}') + called("get_weather", '{"city": "Rome"}')
    caller.reply = lambda _: f"Let me see. {calls}"
    expected = [("get_weather", {"city": "Paris", "days": 2}), ("get_weather", {"city": "Rome"})]
    lines = lines_of(chat(http, model="caller", tools=[WEATHER]))
    whole = chat(http, model="caller", tools=[WEATHER], stream=False).json()
    for parts in (lines, [whole]):
        made = [call for part in parts for call in part["message"].get("tool_calls", [])]
        assert [(call["function"]["name"], call["function"]["arguments"]) for call in made] == expected
        assert [call["function"]["index"] for call in made] == [0, 1]
        assert len({call["id"] for call in made}) == 2
        assert content_of(parts).strip() == "Let me see."
        assert parts[-1]["done_reason"] == "stop"
    assert "get_weather" in caller.prompt()


def test_tools_of_a_model_whose_template_takes_none(http: httpx.Client, leader: ScriptedLeader) -> None:
    """The prompt describes them, with a warning."""
    leader.reply = lambda _: '{"name": "get_weather", "arguments": {"city": "Paris"}}'
    answer = chat(http, tools=[WEATHER], stream=False)
    [call] = answer.json()["message"]["tool_calls"]
    assert (call["function"]["name"], call["function"]["arguments"]) == ("get_weather", {"city": "Paris"})
    assert "takes no tools" in answer.headers["warning"] and "### get_weather" in leader.prompt()


def test_results_find_their_calls_without_ids(http: httpx.Client, caller: ScriptedLeader) -> None:
    """Ollama's client drops the ids of calls: results belong to the calls in their order, or by the tool's name."""
    history: list[Any] = [
        *HELLO,
        {
            "role": "assistant",
            "tool_calls": [
                {"function": {"name": "get_weather", "arguments": {"city": "Paris"}}},
                {"function": {"name": "get_time", "arguments": {}}},
            ],
        },
        {"role": "tool", "content": "noon", "tool_name": "get_time"},
        {"role": "tool", "content": "rain"},
    ]
    chat(http, model="caller", messages=history, tools=[WEATHER]).raise_for_status()
    prompt = caller.prompt()
    assert '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>' in prompt
    assert prompt.index("<tool_response>noon") < prompt.index("<tool_response>rain")


def test_a_model_without_a_template_continues_prompts(http: httpx.Client, server: Server) -> None:
    """/api/generate takes the prompt as it is; /api/chat refuses it."""
    plain = ScriptedLeader(server.url, "plain", byte_assets(chat_template=None))
    plain.start()
    try:
        plain.reply = lambda prompt: prompt + "!"
        assert generate(http, model="plain", stream=False).raise_for_status().json()["response"] == "hello!"
        assert chat(http, model="plain").status_code == 422
    finally:
        plain.stop()


# --- errors, ends and other callers ---


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b'{"model": 7}',
        b'{"model": "tiny", "messages": 1}',
        b'{"model": "tiny", "messages": [{"role": "user", "content": ["x"]}]}',
        b'{"model": "tiny", "messages": [{"role": "wizard", "content": "x"}]}',
        b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"model": "tiny", "messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}',
        b'{"model": "tiny", "messages": [{"role": "user", "tool_calls": [{"function": {"name": "f"}}]}]}',
        b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "options": []}',
        b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "options": {"seed": 1e99}}',
        b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "options": {"stop": {"a": 1}}}',
        b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "tools": [{"type": "x"}]}',
        b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "format": '
        + b"[" * 999
        + b"]" * 999
        + b"}",
        b'{"model": "tiny", "messages": [' + b"[" * 5000 + b"]" * 5000 + b"]}",
        b'{"model": "tiny", "prompt": 1, "context": "x", "images": 3}',
    ],
)
@pytest.mark.parametrize("path", ["/api/chat", "/api/generate", "/api/embed", "/api/embeddings", "/api/show"])
def test_a_body_that_can_not_be_read_is_refused_in_ollamas_form(
    http: httpx.Client, leader: ScriptedLeader, path: str, content: bytes
) -> None:
    """Whatever is sent, the answer is a 4xx with one text, or the model's own; nothing fails inside."""
    answer = http.post(path, content=content)
    assert answer.status_code < 500, answer.text
    if answer.status_code >= 400:
        assert answer.json().keys() == {"error"} and answer.json()["error"]


def test_errors_have_ollamas_form(http: httpx.Client, leader: ScriptedLeader, api: ApiProcess) -> None:
    """An absent model is a 404; so are paths that Ollama has and Furrow has not; a wrong method is a 405."""
    absent = chat(http, model="absent")
    assert absent.status_code == 404 and "'absent' does not exist" in absent.json()["error"]
    for method, path, status in (
        ("POST", "/api/create", 404),
        ("POST", "/api/push", 404),
        ("GET", "/api/chat", 405),
        ("POST", "/api/tags", 405),
    ):
        refused = http.request(method, path, json={})
        assert (refused.status_code, refused.json().keys()) == (status, {"error"})
    large = http.post("/api/chat", content=b" " * 8_000_000)
    assert (large.status_code, large.json().keys()) == (413, {"error"})


def test_a_failure_in_mid_stream_is_the_last_line(http: httpx.Client, leader: ScriptedLeader) -> None:
    """`{"error": …}`, which Ollama's clients raise; of a whole answer it is the body."""
    leader.fail_at = 3
    lines = lines_of(chat(http))
    assert len(lines) > 1 and "the logits were not finite" in lines[-1]["error"]
    whole = chat(http, stream=False)
    assert whole.status_code == 500 and "the logits were not finite" in whole.json()["error"]


def test_a_client_that_leaves_ends_its_request(
    http: httpx.Client, leader: ScriptedLeader, redis_client: SyncRedis, api: ApiProcess
) -> None:
    """At once, as on other endpoints; `on_disconnect` keeps it."""
    leader.pause()
    for policy, state in (("cancel", "cancelled"), ("continue", "finished")):
        body = {"model": "tiny", "messages": HELLO, "on_disconnect": policy}
        with http.stream("POST", "/api/chat", json=body) as response:
            rid = response.headers["x-request-id"]
            leader.step()
            next(response.iter_lines())
        line = until(lambda rid=rid: api.ended(rid))
        assert line[0]["status"] == 499
        if policy == "continue":
            leader.resume()
        hash_key = ModelKeys("tiny").request(rid)
        until(lambda key=hash_key, state=state: redis_client.hget(key, "state") == state)


def test_a_stream_that_was_cut_can_be_read_again(http: httpx.Client, leader: ScriptedLeader) -> None:
    """From its beginning, as lines again, by the id of its request; another tenant does not find it."""
    leader.pause()
    body = {"model": "tiny", "messages": HELLO, "on_disconnect": "continue"}
    with http.stream("POST", "/api/chat", json=body) as response:
        rid = response.headers["x-request-id"]
        leader.step(3)
        next(response.iter_lines())
    leader.resume()
    again = http.get(f"/v1/requests/{rid}/events")
    assert again.headers["content-type"] == "application/x-ndjson"
    lines = lines_of(again)
    assert content_of(lines) == "you said hello" and lines[-1]["done"]
    stranger = http.get(f"/v1/requests/{rid}/events", headers={"authorization": "Bearer other"})
    assert stranger.status_code == 404


def test_one_idempotency_key_is_one_request(http: httpx.Client, leader: ScriptedLeader) -> None:
    """As on other endpoints: the answer of the first."""
    headers = {"idempotency-key": "once"}
    body = {"model": "tiny", "messages": HELLO}
    answers = [lines_of(http.post("/api/chat", json=body, headers=headers)) for _ in range(2)]
    assert [content_of(lines) for lines in answers] == ["you said hello"] * 2
    assert len(leader.claimed) == 1


def test_a_silence_is_ended_by_lines_without_text(
    server: Server, leader: ScriptedLeader, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Clients decode every line: there is no comment, neither about the queue, and no empty line."""
    leader.claiming = False
    with (
        running_api(server.url, tmp_path_factory.mktemp("impatient"), "--keep-alive", "0.1") as impatient,
        httpx.Client(base_url=impatient.url, timeout=40) as client,
        client.stream("POST", "/api/chat", json={"model": "tiny", "messages": HELLO}) as response,
    ):
        reader = response.iter_lines()
        silent = [msgspec.json.decode(next(reader)) for _ in range(3)]
        leader.claiming = True
        rest = [msgspec.json.decode(line) for line in reader]
    assert all(not line["done"] and line["message"]["content"] == "" for line in silent)
    assert content_of([*silent, *rest]) == "you said hello" and rest[-1]["done"]


def test_keys_and_their_limits_hold(guarded: ApiProcess, leader: ScriptedLeader, redis_client: SyncRedis) -> None:
    """401 without a key, 404 for a model that a key does not open, 429 beyond its limit; all in Ollama's form."""
    body = {"model": "tiny", "messages": HELLO}

    def ask(secret: str | None, path: str = "/api/chat", method: str = "POST") -> tuple[int, Any]:
        headers = {} if secret is None else {"authorization": f"Bearer {secret}"}
        answer = httpx.request(method, f"{guarded.url}{path}", json=body, headers=headers, timeout=40)
        return answer.status_code, answer.json() if answer.status_code >= 400 else None

    for path, method in (("/api/chat", "POST"), ("/api/tags", "GET"), ("/api/ps", "GET"), ("/api/show", "POST")):
        status, error = ask(None, path, method)
        assert (status, error.keys()) == (401, {"error"}), path
    assert ask("wrong")[0] == 401
    other = make(redis_client, models=["other"])
    for path in ("/api/chat", "/api/show"):
        status, error = ask(other, path)
        assert (status, error.keys()) == (404, {"error"}), path
    limited = make(redis_client, rpm=1)
    assert ask(limited)[0] == 200
    status, error = ask(limited)
    assert (status, error.keys()) == (429, {"error"})
    assert len(leader.claimed) == 1
