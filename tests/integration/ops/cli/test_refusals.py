"""The command line refuses in one line with the remedy: no traceback, and a clean end."""

from __future__ import annotations

import contextlib
import io
import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from control.records import catalog
from control.redis.connection import connect
from ops.cli import main
from tests.farm import clean_environment, furrow
from tests.models import make
from tests.servers import Server, serving

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def logging_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that run in this process leave its logging as it is for other tests."""

    def keep(style: str = "auto", level: str = "info") -> None:
        pass

    monkeypatch.setattr("control.logs.configure", keep)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("qwen3", tmp_path_factory.mktemp("qwen3"))


def refused(*arguments: str, says: tuple[str, ...], **environment: str) -> None:
    """Run furrow and hold its last words to `says`."""
    ended = furrow(*arguments, **environment)
    assert ended.returncode != 0, ended.stdout
    clear(ended.stderr, says)


def refused_at_once(*arguments: str, says: tuple[str, ...]) -> None:
    """As `refused`, within this process: nothing was started."""
    errors = io.StringIO()
    with pytest.raises(SystemExit) as ended, contextlib.redirect_stderr(errors):
        main(arguments)
    assert ended.value.code != 0
    clear(errors.getvalue(), says)


def clear(errors: str, says: tuple[str, ...]) -> None:
    last = errors.strip().splitlines()[-1]
    assert "Traceback" not in errors
    for part in says:
        assert part in last, errors


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["demo", "--quant", "int4"], ("--quant int4", "use one of int8, f16, q4_0", "q8k")),
        (["demo", "--quant", "int8", "--dtype", "float64"], ("--quant int8", "--dtype float64", "--dtype float32")),
        (["demo", "--quant", "f16", "--devices", "cuda:0"], ("--quant f16", "cuda:0", "--devices cpu")),
        (["demo", "--name", "two words"], ("'two words'", "white space")),
        (["demo", "--name", "{x}"], ("'{x}'", "braces")),
        (["demo", "--tp", "2", "--devices", "cuda:0"], ("1 devices", "2 ranks")),
        (["demo", "--devices", "tpu"], ("'tpu'", "cuda:0")),
        (["demo", "--tp", "3", "--devices", "cpu"], ("3", "--tp 1, 2, 4")),
        (["demo", "--devices", "cuda:7"], ("cuda:7", "--devices")),
    ],
    ids=lambda value: " ".join(value[:3]) if isinstance(value, list) else "",
)
def test_serve_refuses_a_wrong_option_before_anything_runs(
    arguments: list[str], says: tuple[str, ...], tmp_path: Path
) -> None:
    """Each wrong option ends the command."""
    refused_at_once("serve", *arguments, "--port", "0", "--data", str(tmp_path), says=says)


def test_a_second_port_is_refused_before_anything_runs(tmp_path: Path) -> None:
    """One that is taken, and the first one again, name the option."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        data = ("--data", str(tmp_path))
        refused_at_once(
            "serve", "demo", "--port", "0", "--ollama-port", port, *data, says=(port, "choose another --ollama-port")
        )
    both = ("--port", port, "--ollama-port", port)
    refused_at_once("serve", "demo", *both, *data, says=(f"--ollama-port {port}", "leave it out"))
    refused("api", *both, "--redis", "redis://127.0.0.1:1/0", says=(f"--ollama-port {port}", "leave it out"))


@pytest.mark.parametrize("model", ["/no/such/folder", "nobody/no-such-model"])
def test_serve_refuses_a_model_that_is_nowhere(model: str, tmp_path: Path) -> None:
    """Without a hub, too."""
    refused("serve", model, "--port", "0", "--data", str(tmp_path), says=(model,))


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("config.json", None, ("config.json", "missing")),
        ("config.json", json.dumps({"model_type": "perceptron"}), ("perceptron", "llama")),
        ("model.safetensors", "junk", ("model.safetensors",)),
    ],
)
def test_serve_refuses_a_broken_folder(
    name: str, content: str | None, says: tuple[str, ...], checkpoint: Path, tmp_path: Path
) -> None:
    """A folder with one thing wrong is refused naming the file, before any rank is started."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in checkpoint.iterdir():
        if file.name != name:
            (folder / file.name).symlink_to(file)
    if content is not None:
        (folder / name).write_text(content)
    refused("serve", str(folder), "--devices", "cpu", "--port", "0", "--data", str(tmp_path / "data"), says=says)


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    """The command says which port and what to do, before it starts anything."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        refused_at_once("serve", "demo", "--port", port, "--data", str(tmp_path), says=(port, "--port"))


@pytest.mark.parametrize("verb", [["worker"], ["api", "--port", "0"], ["models", "list"]], ids=lambda verb: verb[0])
def test_an_unreachable_redis_is_waited_for_and_then_named(verb: list[str]) -> None:
    """Every part tells that it waits, then ends naming the URL without its password, and the remedy."""
    ended = furrow(*verb, "--redis", "redis://:hunter2@127.0.0.1:1/0", FURROW_REDIS_WAIT="1")
    assert ended.returncode == 1
    assert ended.stderr.count("waiting for Redis at redis://127.0.0.1:1") == 1, "it is told once"
    assert "can't be reached" in ended.stderr and "--redis" in ended.stderr
    assert "hunter2" not in ended.stderr and "Traceback" not in ended.stderr


@pytest.mark.parametrize("verb", [["worker"], ["api", "--port", "0"], ["models", "list"]], ids=lambda verb: verb[0])
def test_a_wrong_password_is_said_at_once(verb: list[str]) -> None:
    """No waiting for what can't come: the password is wrong, and the message says where it belongs."""
    with serving(password="right") as server:
        ended = furrow(*verb, "--redis", f"unix://:wrong@{server.socket}", timeout=60)
    assert ended.returncode == 1
    assert "refused the password" in ended.stderr and "USER:PASSWORD@" in ended.stderr and "wrong@" not in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_part_without_redis_says_how_to_name_one() -> None:
    """A part of a farm without a farm says what to give."""
    refused("models", "list", says=("--redis", "REDIS_URL"))


def test_a_wait_without_a_worker_says_so_and_ends_in_time(new_server: Server) -> None:
    """Within five seconds, and with status 1 at the limit; the model stays desired."""
    with connect(new_server.url) as client:
        client.flushall()
    command = [sys.executable, "-m", "ops.cli", "models", "load", "demo", "--wait", "--timeout", "4"]
    environment = clean_environment(REDIS_URL=new_server.url)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    desired = process.stdout.readline()
    began = time.monotonic()
    lines = [process.stdout.readline() for _ in range(2)]
    assert "loading" in desired and "no worker is alive. Run `furrow worker`" in lines[-1]
    assert time.monotonic() - began < 5
    _, errors = process.communicate(timeout=40)
    assert process.returncode == 1 and "not as desired after 4 s" in errors and "no worker is alive" in errors
    with connect(new_server.url) as client:
        assert catalog.get_spec(client, "demo") is not None


def test_what_can_not_be_waited_for_or_loaded_is_refused(tmp_path: Path) -> None:
    """A limit without a wait, and a file that is no model."""
    refused = furrow("models", "load", "demo", "--timeout", "8", REDIS_URL="redis://127.0.0.1:1")
    assert refused.returncode == 1 and "--timeout is for --wait" in refused.stderr
    (tmp_path / "notes.txt").write_text("")
    refused = furrow("models", "load", str(tmp_path / "notes.txt"), REDIS_URL="redis://127.0.0.1:1")
    assert refused.returncode == 1 and "notes.txt is a file and no model" in refused.stderr
