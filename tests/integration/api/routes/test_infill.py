"""`suffix` of completions and /infill fill a gap: they reach the leader as marks, and are answered in their forms."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from tokenizers import AddedToken

from tests.byte_model import byte_assets, byte_tokenizer
from tests.integration.api.conftest import running_api
from tests.leader import ScriptedLeader
from tests.servers import Server

MARKS = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>", "<|endoftext|>"]
GAP = "<|fim_prefix|>{}<|fim_suffix|>{}<|fim_middle|>"


@pytest.fixture
def coder(server: Server, leader: ScriptedLeader) -> Iterator[ScriptedLeader]:
    """A model with marks beside one without."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in MARKS])
    assets = byte_assets(
        chat_template=None, tokenizer_json=tokenizer.to_str(), vocab_size=tokenizer.get_vocab_size(), context_length=500
    )
    coder = ScriptedLeader(server.url, "coder", assets)
    coder.start()
    coder.reply = lambda prompt: "a + b\n"
    yield coder
    coder.stop()


def prompt_of(coder: ScriptedLeader) -> str:
    """The last prompt, its beginning-of-sequence token left out."""
    return coder.tokenizer.decode(coder.claimed[-1].params.prompt[1:], skip_special_tokens=False)


def infill(http: httpx.Client, **fields: Any) -> httpx.Response:
    return http.post("/infill", json={"model": "coder", "input_prefix": "x = ", "input_suffix": ";"} | fields)


def test_a_suffix_makes_a_gap(client: openai.OpenAI, coder: ScriptedLeader) -> None:
    """OpenAI's client: text, tokens or nothing before the gap, the one suffix for each of several prompts."""
    answer = client.completions.create(model="coder", prompt="x = ", suffix=";", max_tokens=20)
    assert answer.choices[0].text == "a + b\n"
    assert prompt_of(coder) == GAP.format("x = ", ";")
    ends = {coder.tokenizer.token_to_id(mark) for mark in MARKS}
    assert ends < set(coder.claimed[-1].params.sampling.stop_ids)
    client.completions.create(model="coder", prompt=["", "<|fim_suffix|>"], suffix="<s>", max_tokens=20)
    assert {coder.tokenizer.decode(one.params.prompt[1:], skip_special_tokens=False) for one in coder.claimed[1:]} == {
        GAP.format("", "<s>"),
        GAP.format("<|fim_suffix|>", "<s>"),
    }
    assert all(sum(token in ends for token in one.params.prompt) == 3 for one in coder.claimed)
    client.completions.create(model="coder", prompt=coder.tokenizer.encode("ab").ids, suffix=";", max_tokens=20)
    assert prompt_of(coder) == GAP.format("ab", ";")
    client.completions.create(model="coder", prompt="x", suffix="", max_tokens=20)
    assert prompt_of(coder) == "x"


def test_a_gap_that_can_not_be_filled_is_named(
    client: openai.OpenAI, http: httpx.Client, coder: ScriptedLeader
) -> None:
    """No marks, an echo, or texts over the context: a 400 under the name that the client used."""
    with pytest.raises(openai.BadRequestError, match="no tokens that mark a gap") as refused:
        client.completions.create(model="tiny", prompt="x", suffix="y")
    assert refused.value.param == "suffix"
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="coder", prompt="x", suffix="y", echo=True)
    assert refused.value.param == "echo"
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="coder", prompt="x", suffix="y" * 1000)
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "prompt")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"model": "tiny"}, "input_suffix"),
        ({"input_suffix": None}, "input_suffix"),
        ({"input_prefix": "x" * 1_000_000}, "input_prefix"),
        ({"input_extra": [{"filename": "a"}]}, "input_extra[0].text"),
        ({"input_extra": [{"text": ""}] * 5000}, "input_extra"),
        ({"n_predict": -3}, "max_tokens"),
        ({"temperature": 6}, "temperature"),
        ({"mirostat": 2}, "mirostat"),
        ({"n": 2}, "n"),
    ]
    for fields, param in cases:
        answer = infill(http, **fields)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    assert coder.claimed == []


def test_llama_vim_is_answered(http: httpx.Client, coder: ScriptedLeader) -> None:
    """The request of llama.vim with its default settings; fields without an effect are named in a header."""
    answer = infill(
        http,
        input_extra=[{"text": "def f(): ...", "time": [1, 2], "filename": "f.py"}],
        prompt="y + ",
        n_predict=128,
        n_indent=4,
        top_k=40,
        top_p=0.9,
        stream=False,
        samplers=["top_k", "top_p", "infill"],
        cache_prompt=True,
        t_max_prompt_ms=500,
        t_max_predict_ms=1000,
        response_fields=["content", "timings/prompt_n", "truncated", "tokens_cached"],
    )
    body = answer.json()
    assert answer.status_code == 200, answer.text
    assert "'samplers' has no effect" in answer.headers["warning"]
    extra = "<|repo_name|>myproject\n<|file_sep|>f.py\ndef f(): ...<|file_sep|>filename\n"
    assert prompt_of(coder) == extra + GAP.format("x = y + ", ";")
    sampling = coder.claimed[0].params.sampling
    assert (sampling.max_tokens, sampling.top_k, sampling.top_p) == (128, 40, 0.9)
    counts = (body["tokens_evaluated"], body["tokens_predicted"], body["timings"]["predicted_n"])
    assert counts == (len(coder.claimed[0].params.prompt), 7, 7)
    known = ("content", "stop", "stop_type", "stopping_word", "has_new_line", "truncated", "model")
    assert [body[name] for name in known] == ["a + b\n", True, "eos", "", True, False, "coder"]


def test_llama_vim_warms_the_cache(http: httpx.Client, coder: ScriptedLeader) -> None:
    """Before it is asked for anything: files without a gap's texts, and no token is wanted."""
    answer = infill(
        http,
        id_slot=0,
        input_prefix="",
        input_suffix="",
        input_extra=[{"text": "def f(): ...", "time": 1.5, "filename": "f.py"}],
        prompt="",
        n_predict=0,
        temperature=0.0,
        samplers=[],
        stream=False,
        cache_prompt=True,
        t_max_prompt_ms=1,
        t_max_predict_ms=1,
        response_fields=[""],
    )
    assert answer.status_code == 200 and answer.json()["content"] == ""
    assert prompt_of(coder).endswith("def f(): ...<|file_sep|>filename\n" + GAP.format("", ""))


def test_llama_vim_is_instructed(http: httpx.Client, leader: ScriptedLeader) -> None:
    """Its other request goes to chat, with a list of samplers: the header says that it has no effect."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "min_p": 0.1, "temperature": 0.1}
    body |= {"samplers": ["min_p", "temperature"], "cache_prompt": True, "id_slot": 0, "stream": False}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200 and "'samplers' has no effect" in answer.headers["warning"]


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]


def test_a_stream_is_llama_cpp_s(http: httpx.Client, coder: ScriptedLeader) -> None:
    """Parts with `stop: false`, then the counts with `stop: true`, without [DONE]; it can be resumed."""
    answer = infill(http, stream=True, stop=["b"])
    *parts, last = events(answer.text)
    assert "".join(part["content"] for part in parts) == "a + " and not any(part["stop"] for part in parts)
    assert [last[name] for name in ("content", "stop", "stop_type", "stopping_word")] == ["", True, "word", "b"]
    ids = [line[4:] for line in answer.text.splitlines() if line.startswith("id: ")]
    rid = ids[0].partition(":")[0]
    rest = http.get(f"/v1/requests/{rid}/events", headers={"last-event-id": ids[-2]})
    [again] = events(rest.text)
    times = {name for name in last["timings"] if not name.endswith("_n")}
    assert times and last["timings"].keys() == again["timings"].keys()
    for shown in (last, again):
        shown["timings"] = {name: count for name, count in shown["timings"].items() if name not in times}
    assert again == last
    assert http.get(f"/v1/requests/{rid}").json()["endpoint"] == "infill"


@pytest.mark.parametrize(("limit", "most"), [(None, 480), (-1, 480), (-2, 480), (3, 3), (0, 0)])
def test_its_limits_are_llama_cpp_s(http: httpx.Client, coder: ScriptedLeader, limit: int | None, most: int) -> None:
    """Without a limit the rest of the context; 0 only fills the cache."""
    body = infill(http, **({} if limit is None else {"n_predict": limit})).json()
    claimed = coder.claimed[-1].params
    assert claimed.sampling.max_tokens == most if most < 4 else claimed.sampling.max_tokens == 500 - len(claimed.prompt)
    assert body["stop_type"] == ("limit" if most < 4 else "eos") and body["stop"]


def test_strict_refuses_what_has_no_effect(server: Server, coder: ScriptedLeader, tmp_path: Any) -> None:
    """With --strict a field without an effect is a 400 that names it."""
    with running_api(server.url, tmp_path, "--strict") as strict, httpx.Client(base_url=strict.url) as http:
        answer = infill(http, samplers=["top_k"])
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "samplers")
        assert infill(http, samplers=[]).status_code == 200


def test_a_gap_in_ollamas_form(http: httpx.Client, coder: ScriptedLeader) -> None:
    """`suffix` of /api/generate, and what the model says that it can do."""
    body = {"model": "coder", "prompt": "x = ", "suffix": ";", "stream": False}
    answer = http.post("/api/generate", json=body).raise_for_status().json()
    assert (answer["response"], prompt_of(coder)) == ("a + b\n", GAP.format("x = ", ";"))
    assert "insert" in http.post("/api/show", json={"model": "coder"}).json()["capabilities"]
    refused = http.post("/api/generate", json=body | {"suffix": "y" * 1000})
    assert refused.status_code == 400 and "context" in refused.json()["error"]
