"""`furrow run` converses on a terminal and in pipes."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

from control.errors import FurrowError, ModelUnavailable, RedisUnavailable
from control.operations.spec import build_spec
from control.records import catalog
from control.redis.connection import connect
from control.replicas import health, model_overviews
from ops.cli.run import served
from ops.cli.run.chat import answer_once, begin
from ops.cli.run.served import Api, ApiRefused, HttpFarm, RedisFarm, ServedModel, wait_until_served
from ops.demo import MODEL_DIR
from tests.farm import clean_environment
from tests.integration.ops.cli.run.scripted_api import ScriptedApi, scripted_api
from tests.servers import Server
from tests.terminal import CTRL_C, CTRL_D, UP, on_terminal

SHOWN = r"One two\[2J three four\.\n\[4 tokens"
"""The answer without its escape character, and its figures."""
TEXT = "One two\x1b[2J three four.\n"


@pytest.fixture
def api() -> Generator[ScriptedApi]:
    with scripted_api() as api:
        yield api


def test_a_conversation_on_a_terminal(api: ScriptedApi, tmp_path: Path) -> None:
    """Ctrl-C ends an answer and not the chat, an error neither; both are no turn that the next request repeats."""
    (tmp_path / "key").write_text("secret\n")
    options = ("--url", f"{api.url}/v1/", "--key-file", str(tmp_path / "key"))
    with on_terminal("run", "m", *options, XDG_STATE_HOME=str(tmp_path)) as terminal:
        terminal.expect("m answers")
        terminal.expect(">>>")
        terminal.line("Hello")
        terminal.expect(SHOWN)
        terminal.line("/set temperature 0")
        terminal.expect("temperature: 0.0")
        terminal.line("/x")
        terminal.expect("'/x' is no command")
        terminal.expect("/bye")
        terminal.expect(">>>")
        terminal.line('"""/First')
        terminal.expect(r"\.\.\.")
        terminal.line('second"""')
        terminal.expect(SHOWN)
        api.answers = ["refused"]
        terminal.line("Too hot?")
        terminal.expect(r"furrow: too \[31mhot")
        api.answers = ["slow"]
        terminal.line("Slowly")
        terminal.expect("One two")
        terminal.send("unseen" + CTRL_C)
        terminal.expect(r"(?<!unseen)\n\[stopped\]")
        terminal.expect(">>>")
        terminal.send(CTRL_C)
        terminal.expect("Ctrl-D or /bye")
        api.answers = ["queued"]
        terminal.send(UP + "\r")
        terminal.expect("number 7 in the queue")
        terminal.expect("number 2 in the queue")
        terminal.expect(SHOWN)
        terminal.expect(">>>")
        terminal.send(CTRL_D)
        assert terminal.process.wait(20) == 0
    assert "DELETE /v1/requests/rid" in api.paths
    assert api.keys == {"Bearer secret"}
    contents = [one["content"] for one in api.bodies[-1]["messages"]]
    assert contents == ["Hello", TEXT.strip(), "/First\nsecond", TEXT.strip(), "Slowly", "One two", "Slowly"]
    assert api.bodies[-1]["temperature"] == 0.0
    history = tmp_path / "furrow" / "run-history"
    assert history.stat().st_mode & 0o777 == 0o600 and "+Hello" in history.read_text()


def piped(api: ScriptedApi, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ops.cli", "run", *arguments, "--url", api.url]
    return subprocess.run(
        command, input=stdin, capture_output=True, text=True, timeout=60, env=clean_environment(), check=False
    )


def test_a_pipe_gets_the_answer_alone(api: ScriptedApi) -> None:
    """Prompt and standard input are one text; an error is one line on standard error and status 1."""
    process = piped(api, "m", "Sum up:", "--set", "seed=7", "--system", "Be kind.", stdin="a text\n")
    assert (process.stdout, process.returncode) == (TEXT, 0) and "4 tokens" in process.stderr
    assert [one["content"] for one in api.bodies[0]["messages"]] == ["Be kind.", "Sum up:\n\na text"]
    assert (api.bodies[0]["seed"], api.bodies[0]["min_p"]) == (7, 0.05)
    api.answers = ["queued"]
    process = piped(api, "m", "Hello")
    assert process.stdout == TEXT and "furrow: number 7 in the queue, about 4.2 s" in process.stderr
    process = piped(api, "other", "Hello")
    assert (process.stdout, process.returncode) == ("", 1)
    assert (
        process.stderr.strip()
        == f"furrow: {api.url} serves m, not 'other', and can't be told to load it: not an operator"
    )


@pytest.mark.parametrize(
    ("redirected", "status", "told"),
    [("<&-", 0, TEXT), (">&-", 0, ""), ("2>&-", 0, TEXT), ("<&- >&- 2>&-", 0, "")],
)
def test_a_stream_that_is_closed_is_no_error(api: ScriptedApi, redirected: str, status: int, told: str) -> None:
    """As where a daemon starts the command: nothing else gets the number of the stream."""
    command = f"{sys.executable} -m ops.cli run m Hello --url {api.url} {redirected}"
    process = subprocess.run(
        ["sh", "-c", command], capture_output=True, text=True, timeout=60, env=clean_environment(), check=False
    )
    assert (process.returncode, process.stdout) == (status, told), process.stderr
    assert "Traceback" not in process.stderr


def test_what_is_no_prompt_is_named_and_a_large_one_is_sent(api: ScriptedApi) -> None:
    """Bytes that are no text would end the answer before it began."""
    for locale in ("C", "C.UTF-8"):
        command = [sys.executable, "-m", "ops.cli", "run", "m", "--url", api.url]
        environment = clean_environment(LC_ALL=locale)
        process = subprocess.run(command, input=b"a\xff\xfe", capture_output=True, timeout=60, env=environment)
        assert (process.returncode, process.stdout) == (1, b"") and b"is no UTF-8 text" in process.stderr, (
            process.stderr
        )
        assert not api.bodies
    text = "word " * 200_000
    assert piped(api, "m", stdin=text).stdout == TEXT
    assert api.bodies[0]["messages"][0]["content"] == text.strip()


def test_ctrl_c_in_a_pipe_cancels_the_request(api: ScriptedApi) -> None:
    """And the exit status is 130, as that of any program."""
    api.answers = ["slow"]
    command = [sys.executable, "-m", "ops.cli", "run", "m", "Hello", "--url", api.url]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=clean_environment()
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read(7) == b"One two"
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
    assert "DELETE /v1/requests/rid" in api.paths


def test_a_stream_that_is_cut_goes_on(api: ScriptedApi, capsys: pytest.CaptureFixture[str]) -> None:
    """The text is that of an undisturbed answer: it is asked for from the last event on."""
    api.answers = ["cut", "cut", "whole"]
    with Api(api.url, "") as client:
        answer_once(client, begin(ServedModel("m", True, 64)), "Hello")
    assert capsys.readouterr().out == TEXT
    assert api.resumed == [None, "rid:2.1"] and api.bodies[0] == api.bodies[1]


def test_a_model_without_a_template_continues(api: ScriptedApi, capsys: pytest.CaptureFixture[str]) -> None:
    """By /v1/completions, with an end."""
    with Api(api.url, "") as client:
        answer_once(client, begin(ServedModel("m", False, 64)), "Once")
    assert capsys.readouterr().out == TEXT
    assert (api.bodies[0]["prompt"], api.bodies[0]["max_tokens"]) == ("Once", 256)


def test_an_error_is_raised(api: ScriptedApi) -> None:
    api.answers = ["refused"]
    with Api(api.url, "") as client, pytest.raises(FurrowError, match=r"too .*hot"):
        answer_once(client, begin(ServedModel("m", True, 64)), "Hello")


def test_an_api_loads_a_model_for_an_operator(api: ScriptedApi, capsys: pytest.CaptureFixture[str]) -> None:
    """With the options that were given; `demo` is the farm's own."""
    api.operator = True
    spec = build_spec("demo", tp=2, devices="cpu", demo=MODEL_DIR)
    with Api(api.url, "") as client:
        farm = HttpFarm(client)
        assert farm.desire(spec, "demo") and not farm.desire(build_spec("m"), "m")
        found = wait_until_served(farm, client, spec)
    assert (found.name, found.chat, found.context, found.sampling) == ("demo", True, 64, False)
    [body] = api.loaded
    assert (body["source"], body["tp"], body["devices"]) == ("demo", 2, "cpu,cpu")
    assert "demo: loading (rank 0)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "state", "told"), [("embed", "loaded", "embeddings"), ("generate", "failed", "rank 0")]
)
def test_a_model_that_can_not_answer_is_named(api: ScriptedApi, kind: str, state: str, told: str) -> None:
    api.kind, api.states["m"] = kind, [state]
    with Api(api.url, "") as client, pytest.raises(FurrowError, match=told):
        wait_until_served(HttpFarm(client), client, build_spec("m"))


def test_a_model_that_this_command_loaded_in_vain_is_unloaded(api: ScriptedApi) -> None:
    """A mistyped name stays on no farm, and the names that the farm has are printed; another's failed model stays."""
    api.operator, api.fails = True, True
    process = piped(api, "nope", "Hello")
    assert process.returncode == 1 and process.stdout == ""
    assert "'nope' was not on the farm, which has m." in process.stderr
    assert "furrow: 'nope' can't be loaded, and is unloaded again: rank 0" in process.stderr
    assert api.unloaded == ["nope"]
    api.states["m"] = ["failed"]
    assert piped(api, "m", "Hello").returncode == 1 and api.unloaded == ["nope"]


def test_an_error_after_the_load_hides_neither_the_cause_nor_the_model(api: ScriptedApi) -> None:
    """Names that can't be read end nothing; an unload that fails is told after the cause, with what does it."""
    api.operator, api.fails, api.refuses = True, True, ("/v1/models", "/farm/models/unload")
    process = piped(api, "nope", "Hello")
    assert process.returncode == 1 and "models that can't be listed (no Redis)" in process.stderr
    assert "'nope' can't be loaded: rank 0. It is still on the farm (no Redis)" in process.stderr
    assert "`furrow models unload nope`" in process.stderr.rpartition("It is still")[2]


def test_a_known_model_keeps_its_specification(new_server: Server, tmp_path: Path) -> None:
    """One that failed is told with its cause and the remedy, though other options and another source were given."""
    spec = build_spec("org/m", name="m", tp=4, devices="cpu", kv_tokens=4096)
    with connect(new_server.url) as client:
        client.flushall()
        catalog.put_spec(client, spec)
        before = catalog.get_spec(client, "m")
        farm = RedisFarm(client)
        assert not farm.desire(build_spec("m"), "m")
        health.write_status(client, "m", "r0", "failed", "out of memory")
        for given, model in ((build_spec("m"), "m"), (build_spec("org/m", name="m"), "org/m")):
            with pytest.raises(ModelUnavailable, match=r"out of memory.*furrow models reload m"):
                farm.desire(given, model)
        with pytest.raises(FurrowError, match="another --name"):
            farm.desire(build_spec("other/m", name="m"), "other/m")
        assert catalog.get_spec(client, "m") == before
        with pytest.raises(FurrowError, match="unloaded"):
            farm.stage("gone")
        client.flushall()
        assert farm.desire(build_spec("m"), "m")  # the control: an unknown one is loaded


def test_redis_that_stops_is_waited_for(new_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The load goes on without this command; the wait has an end."""
    with connect(new_server.url) as client:
        client.flushall()
        farm = RedisFarm(client)
        assert farm.desire(build_spec("m"), "m") and farm.names() == ["m"]
        assert farm.stage("m") is not None

        def away(*_: object) -> None:
            raise RedisUnavailable("no connection")

        with monkeypatch.context() as gone:
            gone.setattr(model_overviews, "overview", away)
            stage = farm.stage("m")
            assert stage is not None and "Redis is waited for: no connection" in stage.text
            gone.setattr(served, "SILENCE_S", 0.0)
            with pytest.raises(FurrowError, match="no connection"):
                farm.stage("m")
        stage = farm.stage("m")
        assert stage is not None and "no worker has it yet" in stage.text


def test_the_wait_for_a_model_goes_on_and_ends(api: ScriptedApi, monkeypatch: pytest.MonkeyPatch) -> None:
    """A 503 is waited for; a model that another operator unloads, and an API that is gone, end the wait."""
    monkeypatch.setattr(HttpFarm, "tick_s", 0.01)
    api.states["m"] = ["503", "loading", "503", "loaded"]
    with Api(api.url, "") as client:
        assert wait_until_served(HttpFarm(client), client, build_spec("m")).name == "m"
        api.states["m"] = ["loading", "404"]
        with pytest.raises(FurrowError, match="was unloaded"):
            wait_until_served(HttpFarm(client), client, build_spec("m"))
        monkeypatch.setattr(served, "SILENCE_S", 0.05)
        api.states["m"] = ["loaded", "503"]  # after its farm said that the model is loaded
        with pytest.raises(ApiRefused, match="no farm"):
            wait_until_served(HttpFarm(client), client, build_spec("m"))
    with Api("http://127.0.0.1:1", "") as client, pytest.raises(ApiRefused, match="can't be reached"):
        wait_until_served(HttpFarm(client), client, build_spec("m"))


@pytest.mark.parametrize("url", ["nonsense", "http://", "http://127.0.0.1:1"])
def test_an_api_that_is_none_is_named(url: str) -> None:
    with pytest.raises(FurrowError, match=url), Api(url, "") as client:
        client.card("m")
