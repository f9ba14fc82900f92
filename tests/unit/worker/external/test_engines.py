"""Three external engines pass one suite: each module beside a scripted server of its shape."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from control.engines import ENGINES
from control.messages import Sampling
from ops.harness.scripted_engine import Script, alternatives, logprob, server_of
from tests.waiting import until
from worker.external.client import EngineClient, Output, samples_of
from worker.external.engine import Address, EngineStats, Launch, Piece, seed_of
from worker.external.host import CLASSES

PROMPT = [5, 6, 7]


class Beside:
    """A scripted engine in a thread, and the client of its module."""

    def __init__(self, name: str, folder: Path) -> None:
        self.script = Script(name)
        self.engine = CLASSES[name]("m")
        self.socket = str(folder / "e.sock")
        self.server = server_of(self.script, uds=self.socket)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        self.client = EngineClient(self.engine, Address(socket=self.socket))

    def __enter__(self) -> Beside:
        self.client.__enter__()
        until(self.client.is_ready, 20.0)
        return self

    def __exit__(self, *_: object) -> None:
        self.client.__exit__(None, None, None)
        self.server.should_exit = True
        self.thread.join(10)

    def ask(self, most: int, key: int = 1, tokens: list[int] | None = None, **sampling: object) -> None:
        settings = Sampling(**{"max_tokens": most, "temperature": 0.0} | sampling)  # type: ignore[arg-type]
        self.client.submit(key, Piece(tokens=tokens or PROMPT, sampling=settings, most=most))

    def hear(self, key: int = 1) -> list[Output]:
        """All outputs of a piece up to its last one."""
        outputs: list[Output] = []
        until(lambda: outputs.extend(self.client.outputs(0.05)) or any(_is_last(one) for one in outputs), 20.0)
        return [one for one in outputs if one.key == key]

    def expected(self, count: int, tokens: list[int] | None = None) -> list[int]:
        so_far = list(tokens or PROMPT)
        for _ in range(count):
            so_far.append(self.script.next_token(so_far))
        return so_far[-count:]

    def order(self, **fault: object) -> None:
        transport = httpx.HTTPTransport(uds=self.socket)
        with httpx.Client(transport=transport, base_url="http://engine") as client:
            client.post("/fault", json=fault).raise_for_status()


def _is_last(output: Output) -> bool:
    return bool(output.failure or output.part.end)


def _tokens(outputs: list[Output]) -> list[int]:
    return [token for one in outputs for token in one.part.tokens]


@pytest.fixture(params=list(ENGINES))
def beside(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Beside]:
    with Beside(request.param, tmp_path) as beside:
        yield beside


def test_each_token_comes_once_and_in_order_with_the_end(beside: Beside) -> None:
    beside.ask(40)
    outputs = beside.hear()
    assert _tokens(outputs) == beside.expected(40)
    assert outputs[-1].part.end == "length" and not outputs[-1].failure


@pytest.mark.parametrize("count", [0, 3])
def test_each_token_has_its_log_probability_and_alternatives(beside: Beside, count: int) -> None:
    beside.ask(12, logprobs=count)
    rows = [row for one in beside.hear() for row in one.part.logprobs]
    assert [row.chosen for row in rows] == [logprob(token) for token in beside.expected(12)]
    assert [row.top for row in rows] == [alternatives(token, count) for token in beside.expected(12)]


def test_an_answer_says_what_was_cached_or_the_gauges_do(beside: Beside) -> None:
    beside.ask(5, tokens=[7] * 10)
    outputs = beside.hear()
    if beside.engine.name == "vllm":
        beside.client.stats = EngineStats(prefix_hits=40)
        assert beside.client.prefix_hits() == 0, "of others, before this client came"
        beside.client.stats = EngineStats(prefix_hits=56)
        assert beside.client.prefix_hits() == 16
        beside.client.stats = EngineStats(prefix_hits=8)
        assert beside.client.prefix_hits() == 8, "the engine was started again"
    else:
        assert outputs[0].part.cached == 5
    assert beside.client.version() == "scripted"


def test_pieces_run_beside_each_other(beside: Beside) -> None:
    for key in range(1, 33):
        beside.ask(20, key, [key, 9])
    heard: dict[int, list[int]] = {}
    ended: set[int] = set()

    def hear() -> bool:
        for one in beside.client.outputs(0.05):
            heard.setdefault(one.key, []).extend(one.part.tokens)
            if _is_last(one):
                ended.add(one.key)
        return len(ended) == 32

    until(hear, 20.0)
    assert heard == {key: beside.expected(20, [key, 9]) for key in range(1, 33)}


def test_a_continuation_equals_what_would_have_come(beside: Beside) -> None:
    beside.ask(10, 2, PROMPT + beside.expected(10))
    assert _tokens(beside.hear(2)) == beside.expected(20)[10:]


def test_a_stop_id_ends_a_piece_and_is_its_last_token(beside: Beside) -> None:
    stop = beside.expected(12)[-1]
    if not beside.engine.streams:
        pytest.skip("llama-server stops at the model's own ends alone; Furrow cuts its pieces")
    beside.ask(40, stop_ids=[stop])
    outputs = beside.hear()
    assert _tokens(outputs) == beside.expected(beside.expected(40).index(stop) + 1)
    assert outputs[-1].part.end == "stop"


@pytest.mark.parametrize("kind", ["half", "repeat", "abort"])
def test_a_piece_that_is_cut_off_repeats_no_token(beside: Beside, kind: str) -> None:
    beside.order(kind=kind, after=7)
    beside.ask(40)
    outputs = beside.hear()
    tokens = _tokens(outputs)
    assert tokens == beside.expected(7)[: len(tokens)]
    assert outputs[-1].failure in ("lost", "failed") or outputs[-1].part.end == "abort"


@pytest.mark.parametrize(("kind", "failure"), [("error", "failed"), ("refuse", "refused")])
def test_an_error_is_told_with_the_engines_words(beside: Beside, kind: str, failure: str) -> None:
    beside.order(kind=kind)
    beside.ask(5)
    [output] = beside.hear()
    assert output.failure == failure and "on order" in output.part.error
    beside.ask(5)
    assert _tokens(beside.hear()) == beside.expected(5), "the next one is served"


def test_a_cancelled_piece_ends_at_the_engine(beside: Beside) -> None:
    beside.script.rate = 50.0
    beside.ask(10_000)
    until(lambda: beside.script.running == 1, 20.0)
    beside.client.cancel(1)
    until(lambda: beside.script.running == 0 and beside.script.ended_early == 1, 20.0)


def test_a_silent_engine_brings_nothing_and_answers_health(beside: Beside) -> None:
    beside.order(kind="silence", after=3)
    beside.ask(20)
    until(lambda: beside.script.requests == 1, 20.0)
    beside.client.outputs(0.3)
    assert beside.client.outputs(0.3) == []
    assert beside.client.is_ready()


def test_the_gauges_are_read(beside: Beside) -> None:
    beside.script.rate = 20.0
    beside.ask(200)
    until(lambda: beside.client.stats.running == 1, 20.0)


def test_an_engine_that_is_gone_is_not_ready_and_its_pieces_are_lost(beside: Beside) -> None:
    beside.script.rate = 20.0
    beside.ask(1000)
    until(lambda: beside.script.running == 1, 20.0)
    beside.server.force_exit = beside.server.should_exit = True
    [*_, last] = beside.hear()
    assert last.failure in ("lost", "failed")
    until(lambda: not beside.client.is_ready(), 20.0)


@pytest.mark.parametrize("name", list(ENGINES))
def test_a_command_listens_on_this_host_alone_and_runs_no_foreign_code(name: str, tmp_path: Path) -> None:
    address = Address(socket="/run/x.sock") if CLASSES[name].socket_option else Address(url="http://127.0.0.1:20001")
    arguments = {CLASSES[name].sequences[0]: "7"}
    launch = Launch(tmp_path, "m", address, ("cuda:1", "cuda:3"), arguments, context=2048)
    words = CLASSES[name].command(launch)
    environment = CLASSES[name].environment(launch)
    assert "0.0.0.0" not in " ".join(words) and not any("remote-code" in word for word in words)
    assert any(word.endswith("7") for word in words), "the model's option is passed on"
    assert environment["CUDA_VISIBLE_DEVICES"] == "1,3" and environment["HF_HUB_OFFLINE"] == "1"


@pytest.mark.parametrize("name", list(ENGINES))
def test_an_adapter_is_loaded_and_named_in_its_requests(name: str, tmp_path: Path) -> None:
    adapters = {"sql": "/a/sql", "chat": "/a/chat"}
    launch = Launch(
        model=tmp_path,
        name="m",
        address=Address(socket=str(tmp_path / "e.sock")) if CLASSES[name].socket_option else Address(url="http://h:1"),
        devices=("cpu",),
        arguments={},
        adapters=adapters,
    )
    words = CLASSES[name].command(launch)
    assert all(any(place in word for word in words) for place in adapters.values())
    engine = CLASSES[name]("m", list(adapters))
    settings = Sampling(max_tokens=5, adapter="chat")
    _, body = engine.request(Piece(tokens=PROMPT, sampling=settings, most=5))
    named = {"vllm": ("model", "m:chat"), "sglang": ("lora_path", "chat")}
    key, value = named.get(name, ("lora", [{"id": 1, "scale": 1.0}]))
    assert body[key] == value
    _, plain = engine.request(Piece(tokens=PROMPT, sampling=Sampling(max_tokens=5), most=5))
    assert plain.get(key) != value


def test_seeds_of_pieces_differ_and_repeat_for_the_same_place() -> None:
    seeds = {seed_of("1", choice, position) for choice in range(4) for position in range(100)}
    assert len(seeds) == 400 and all(0 <= seed < 2**63 for seed in seeds)
    assert seed_of("1", 0, 5) == seed_of("1", 0, 5) != seed_of("2", 0, 5)


def test_samples_of_an_exposition_are_summed_over_labels() -> None:
    text = '# HELP x y\nx{a="1"} 2\nx{a="2"} 3.5\ny 1e3\nbroken line\n'
    assert samples_of(text) == {"x": 5.5, "y": 1000.0}
