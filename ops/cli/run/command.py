"""`furrow run`: talk to a model."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import click

from control import logs
from control.errors import FurrowError, ModelUnavailable, SettingsError
from control.messages import ModelSpec
from control.operations.local_farms import local_farms
from control.operations.options import connect_to_farm, redis_option
from control.operations.spec import build_spec
from control.records import catalog
from control.settings import redis_reference, redis_url_from_environment
from ops.cli.options import model_options
from ops.cli.run.chat import answer_once, begin, interactive, talk, terminal
from ops.cli.run.conversation import read_setting
from ops.cli.run.own_farm import OwnFarm
from ops.cli.run.served import Api, HttpFarm, RedisFarm, ServedModel, wait_until_served
from ops.cli.tables import echo_line
from ops.common.engine_options import ENGINE_OPTIONS, engine_environment, engine_options
from ops.demo import MODEL_DIR

KEY_VARIABLE = "FURROW_API_KEY"


@click.command(short_help="Talk to a model.")
@click.argument("model")
@click.argument("prompt", required=False)
@click.option("--url", metavar="URL", help=f"API to use, such as http://127.0.0.1:8000; its key is in ${KEY_VARIABLE}.")
@click.option("--key-file", type=click.Path(dir_okay=False, path_type=Path), help="File with the API key for --url.")
@click.option("--system", default="", help="System prompt.")
@click.option("--set", "assigned", metavar="NAME=VALUE", multiple=True, help="As /set: temperature=0. Repeatable.")
@click.option("--history/--no-history", default=True, help="Keep the inputs for the arrow keys of the next time.")
@click.option("--verbose", is_flag=True, help="Print the logs of the processes that are started.")
@model_options
@engine_options
@redis_option
def run(
    model: str,
    prompt: str | None,
    url: str | None,
    key_file: Path | None,
    system: str,
    assigned: tuple[str, ...],
    history: bool,
    verbose: bool,
    redis_url: str | None,
    **options: Any,
) -> None:
    """Talk to MODEL (`demo`, a folder, a GGUF file, or a Hugging Face repository), which is loaded if it is not.

    With PROMPT, or in a pipe, the answer alone is printed on standard output, and the command ends; text on standard
    input is appended to PROMPT. Exit status 1: no answer.

    The model is that of --url, or of the farm at --redis or $REDIS_URL, where it stays loaded. With neither it is that
    of the `furrow serve` that runs here, where that has the model; else the command starts a private farm, which ends
    with it.
    """
    if url is not None and redis_url is not None:
        raise click.UsageError("give --url or --redis, not both")
    parameters = _settings(assigned)
    os.environ.update(engine_environment(**{name: options.pop(name) for name in ENGINE_OPTIONS}))
    spec = build_spec(model, demo=MODEL_DIR, **options)
    one_answer = prompt is not None or not interactive()
    text = _text(prompt) if one_answer else ""
    logs.configure(level="info" if verbose else "critical")
    end_in_order()
    try:
        with ExitStack() as stack:
            api, served = (
                _through_api(url, key_file, spec, model, stack)
                if url
                else _by_redis(redis_url, verbose, spec, model, stack)
            )
            conversation = begin(served, system, parameters)
            if one_answer:
                answer_once(api, conversation, text)
            else:
                talk(api, served, conversation, terminal(history))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing is flushed into the pipe at the exit
        sys.exit(1)


def _through_api(
    url: str, key_file: Path | None, spec: ModelSpec, model: str, stack: ExitStack
) -> tuple[Api, ServedModel]:
    api = stack.enter_context(Api(url, _key(key_file)))
    farm = HttpFarm(api)
    added = farm.desire(spec, model)
    if added:
        _say(_stays(spec, farm))
    with _withdrawn_if_it_fails(farm if added else None, spec):
        return api, wait_until_served(farm, api, spec)


def _by_redis(
    redis: str | None, verbose: bool, spec: ModelSpec, model: str, stack: ExitStack
) -> tuple[Api, ServedModel]:
    """A farm's Redis with an API process of our own, or all of a private farm."""
    redis = redis or redis_url_from_environment() or _serving_here(spec)
    own = OwnFarm(redis_reference(redis) if redis else None, verbose, _say)
    farm = None
    added = False
    if redis:
        farm = RedisFarm(connect_to_farm(redis))
        added = farm.desire(spec, model)
        if added:
            _say(_stays(spec, farm))
    stack.enter_context(own)
    if farm is None:
        farm = RedisFarm(connect_to_farm(own.redis), private=True)
        farm.desire(spec, model)
    api = stack.enter_context(Api(own.url, own.key))
    with _withdrawn_if_it_fails(farm if added else None, spec):
        return api, wait_until_served(farm, api, spec, own.check)


def _serving_here(spec: ModelSpec) -> str | None:
    """The folder of the `furrow serve` of this machine that has the model; None where none has."""
    for folder in local_farms(of_serve=True):
        with suppress(FurrowError), connect_to_farm(str(folder)) as client:
            current = catalog.get_spec(client, spec.name)
            if current is not None and current.source == spec.source and not current.unload:
                _say(f"answered by the `furrow serve` that runs here ({folder.name})")
                return str(folder)
    return None


@contextmanager
def _withdrawn_if_it_fails(farm: RedisFarm | HttpFarm | None, spec: ModelSpec) -> Generator[None]:
    """Unload a model that this command has loaded on `farm` and that can't be served: a wrong name would stay there."""
    try:
        yield
    except ModelUnavailable as error:
        if farm is None or error.state != "failed":
            raise
        try:
            farm.withdraw(spec.name)
        except FurrowError as failed:
            remedy = f"It is still on the farm ({failed}): `furrow models unload {spec.name}` removes it."
            raise FurrowError(f"'{spec.name}' can't be loaded: {error.detail}. {remedy}") from None
        raise FurrowError(f"'{spec.name}' can't be loaded, and is unloaded again: {error.detail}") from None


def _stays(spec: ModelSpec, farm: RedisFarm | HttpFarm) -> str:
    try:
        others = ", ".join(name for name in farm.names() if name != spec.name) or "no other model"
    except FurrowError as error:  # no reason to give the model up
        others = f"models that can't be listed ({error})"
    stays = f"It is loaded, and stays loaded: `furrow models unload {spec.name}` ends it."
    return f"'{spec.name}' was not on the farm, which has {others}. {stays}"


def _settings(assigned: tuple[str, ...]) -> dict[str, Any]:
    """Raises SettingsError naming the parameter."""
    parameters: dict[str, Any] = {}
    for text in assigned:
        name, separator, value = text.partition("=")
        if not separator:
            raise SettingsError(f"--set {text}: write NAME=VALUE, such as temperature=0")
        parameters[name.strip()] = read_setting(name.strip(), value.strip())
    return parameters


def _key(file: Path | None) -> str:
    if file is None:
        return os.environ.get(KEY_VARIABLE, "").strip()
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"--key-file {file} can't be read: {error}") from None


def _text(prompt: str | None) -> str:
    """The prompt and what stands on standard input, with an empty line between."""
    piped = ""
    if not sys.stdin.isatty():
        piped = _standard_input()
    elif prompt is None:
        _say("type the prompt; Ctrl-D ends it")
        piped = _standard_input()
    text = "\n\n".join(part for part in ((prompt or "").strip(), piped.strip()) if part)
    if not text:
        raise SettingsError("there is no prompt: give it as PROMPT, or on standard input")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise SettingsError(f"the prompt is no UTF-8 text, from character {error.start + 1} on: convert it") from None
    return text


def _standard_input() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise SettingsError(f"standard input is no UTF-8 text, from byte {error.start + 1} on: convert it") from None
    except OSError as error:
        raise SettingsError(f"standard input can't be read: {error.strerror}") from None


def _say(line: str) -> None:
    echo_line(f"furrow: {line}", err=True)


def end_in_order() -> None:
    """Let SIGTERM and SIGHUP end the command as Ctrl-D does: the processes that it started are stopped in order."""

    def end(number: int, _frame: FrameType | None) -> None:
        for ending in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(ending, signal.SIG_IGN)
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end)
