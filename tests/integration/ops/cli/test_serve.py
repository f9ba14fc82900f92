"""Options of `furrow serve` become the desired state."""

from __future__ import annotations

import socket
from contextlib import closing
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from api.__main__ import main as api
from api.options import api_options, take_api_arguments
from api.settings import ApiSettings
from control.errors import RedisUnavailable, SettingsError
from control.messages import Assignment, ModelSpec
from control.placement import farm, membership
from control.placement.placement import Host
from control.records import catalog
from control.redis.connection import connect
from control.replicas import model_overviews
from ops.cli import serving
from ops.cli.serve import build_specs, serve
from ops.cli.serving import desire
from ops.demo import MODEL_DIR
from tests.servers import Server

OLD, NEW = ModelSpec(name="old", source="/old"), ModelSpec(name="new", source="/new")


def test_only_what_is_served_now_is_started(new_server: Server) -> None:
    """On a private server an earlier model goes with its assignments; on a shared one it is somebody else's."""
    with closing(connect(new_server.url)) as client:
        client.flushall()
        membership.beat_host(client, Host("one", ("cpu",)), 1, 1)
        for spec in (OLD, NEW):
            catalog.put_spec(client, spec)
            farm.assign(client, "one", Assignment(spec=spec, replica="r0", ranks=[0], devices=["cpu"]))
        desire(client, [NEW], alone=False)
        assert len(catalog.list_specs(client)) == len(farm.assignments(client, "one")) == 2
        desire(client, [NEW], alone=True)
        assert [spec.name for spec in catalog.list_specs(client)] == ["new"]
        assert [assignment.spec.name for assignment in farm.assignments(client, "one")] == ["new"]


def test_a_redis_that_does_not_answer_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pause of Redis during the load ends neither the command nor, with it, the farm."""
    loaded = model_overviews.Overview(
        model="new",
        state="loaded",
        detail="",
        queued=0,
        revision=1,
        wanted=1,
        rolled_out=1,
        assets=None,
        replicas=[],
    )
    answers = iter([RedisUnavailable("timeout"), loaded])

    def overview(_client: object, _model: str) -> model_overviews.Overview:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def is_ready(_address: object) -> bool:
        return True

    class Tended:
        turns = 0

        def tend(self) -> None:
            self.turns += 1

    supervisor: Any = Tended()
    stopping: Any = False
    monkeypatch.setattr(model_overviews, "overview", overview)
    monkeypatch.setattr(serving, "is_ready", is_ready)
    monkeypatch.setattr(serving, "TICK_S", 0.0)
    client: Any = None
    serving.wait_until_served(client, [NEW], ("127.0.0.1", 1), supervisor.tend, lambda: bool(stopping))
    assert supervisor.turns == 2
    assert "Redis does not answer" in capsys.readouterr().err


@click.command(context_settings={"default_map": {"grace": 5.0}})
@click.option("--own")
@api_options
@click.pass_context
def command(context: click.Context, **options: Any) -> None:
    click.echo(" ".join([*take_api_arguments(context, options), str(options)]))


def test_options_of_an_api_process_are_passed_on() -> None:
    """Those that were given, and the default that differs; the environment reaches the process by itself."""
    words = ["--served-model-name", "a=m", "--own", "x", "--served-model-name", "*", "--max-body", "2"]
    result = CliRunner().invoke(command, words, env={"FURROW_HEADER_TIMEOUT": "3"})
    expected = "--served-model-name a=m --served-model-name * --grace 5.0 --max-body 2.0 {'own': 'x'}"
    assert result.output.strip() == expected


def nothing_done(*_arguments: object) -> int:
    """In place of what an API process does before it serves."""
    return 0


@pytest.mark.parametrize("through_serve", [False, True])
def test_templates_of_files_reach_an_api_process(
    through_serve: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By their absolute paths; a file that is no response template is refused at once."""
    settings: list[ApiSettings] = []
    monkeypatch.setenv("FURROW_REDIS_URL", "redis://nowhere")
    monkeypatch.setattr("api.__main__.serve", settings.append)
    monkeypatch.setattr("api.__main__.count_keys", nothing_done)
    monkeypatch.setattr("control.logs.configure", nothing_done)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "form.json").write_text('{"fields": {"content": {}}}')
    (tmp_path / "wrong.json").write_text('{"fields": {}}')
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    words = ["--response-template", "form.json", "--chat-template", "chat.jinja"]
    if through_serve:
        words = CliRunner().invoke(command, words).output.partition(" {")[0].split()
    result = CliRunner().invoke(api, words)
    assert result.exit_code == 0, result.output
    assert settings[0].response_template == str(tmp_path / "form.json")
    assert settings[0].chat_template == str(tmp_path / "chat.jinja")
    for wrong in (["--response-template", "wrong.json"], ["--chat-template", "missing"]):
        refused = CliRunner().invoke(api, wrong)
        assert refused.exit_code == 2 and wrong[1] in refused.output


@pytest.mark.parametrize("through_serve", [False, True])
def test_trusted_templates_reach_an_api_process(through_serve: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the command line of `furrow api`, and from that of `furrow serve` through it."""
    settings: list[ApiSettings] = []
    monkeypatch.setenv("FURROW_REDIS_URL", "redis://nowhere")
    monkeypatch.setattr("api.__main__.serve", settings.append)
    monkeypatch.setattr("api.__main__.count_keys", nothing_done)
    monkeypatch.setattr("control.logs.configure", nothing_done)
    words = ["--trust-template", "m", "--trust-template", "0e1ceaf4"]
    assert "--trust-template" in CliRunner().invoke(serve, ["--help"]).output
    if through_serve:
        words = CliRunner().invoke(command, words).output.partition(" {")[0].split()
    result = CliRunner().invoke(api, words)
    assert result.exit_code == 0, result.output
    assert settings[0].trusted_templates == ("m", "0e1ceaf4")


@pytest.mark.parametrize("through_serve", [False, True])
def test_the_second_port_reaches_an_api_process(through_serve: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the trusted templates do; without the option there is none."""
    settings: list[ApiSettings] = []
    monkeypatch.setenv("FURROW_REDIS_URL", "redis://nowhere")
    monkeypatch.setattr("api.__main__.serve", settings.append)
    monkeypatch.setattr("api.__main__.count_keys", nothing_done)
    monkeypatch.setattr("control.logs.configure", nothing_done)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    words = ["--ollama-port", str(port)]
    if through_serve:
        words = CliRunner().invoke(command, words).output.partition(" {")[0].split()
    for arguments in ([*words, "--port", "0"], ["--port", "0"]):
        result = CliRunner().invoke(api, arguments)
        assert result.exit_code == 0, result.output
    assert [one.ollama_port for one in settings] == [port, None]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["demo", "--keep-alive", "0"], "--keep-alive"),
        (["demo", "--cors-origin", "nonsense"], "is no origin"),
        (["demo", "--max-queued", "0"], "--max-queued"),
        (["demo", "--tool-parser", "nonsense"], "--tool-parser"),
        (["demo", "--share-prefixes", "a,b c"], "'b c' is no tenant's name"),
        ([], "MODEL"),
    ],
)
def test_a_wrong_option_of_an_api_process_is_refused_at_once(words: list[str], text: str) -> None:
    """Before a process is started."""
    result = CliRunner().invoke(serve, words)
    assert result.exit_code == 2 and text in result.output


PLAIN: dict[str, Any] = {
    "tp": 1,
    "devices": "cpu",
    "dtype": "auto",
    "max_context": None,
    "kv_tokens": None,
    "quant": None,
}


def test_each_model_has_its_own_name() -> None:
    specs = build_specs(["demo", str(MODEL_DIR)], name=None, **PLAIN)
    assert [spec.name for spec in specs] == ["demo", MODEL_DIR.name]
    assert [spec.name for spec in build_specs(["demo"], name="other", **PLAIN)] == ["other"]


@pytest.mark.parametrize(
    ("models", "name", "text"),
    [(["demo", "demo"], None, "two models would have the name 'demo'"), (["demo", "/m"], "one", "--name is for one")],
)
def test_two_models_of_one_name_are_refused(models: list[str], name: str | None, text: str) -> None:
    with pytest.raises(SettingsError, match=text):
        build_specs(models, name=name, **PLAIN)
