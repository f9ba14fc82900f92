"""The loop of a conversation, and one answer without a conversation."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any

import click

from control.errors import FurrowError, SettingsError
from ops.cli.progress import Stage, Waiting
from ops.cli.run.answer import Answer, Piece
from ops.cli.run.api import Api
from ops.cli.run.commands import TABLE, Commands, Stats, in_words
from ops.cli.run.conversation import Conversation
from ops.cli.run.served import Served
from ops.cli.run.terminal import Terminal, without_echo, write
from ops.cli.tables import duration, fit

COMPLETION_TOKENS = 256
"""max_tokens for a model without a chat template: many of them never end by themselves."""
SAMPLING = {"temperature": 0.8, "top_p": 0.95, "min_p": 0.05}
"""llama.cpp's, for a model without sampling defaults: OpenAI's temperature of 1 is too high for small models."""


def begin(served: Served, system: str = "", given: dict[str, Any] | None = None) -> Conversation:
    """An empty conversation with the settings that were given. Raises SettingsError for a system prompt in vain."""
    if system and not served.chat:
        raise SettingsError(f"{served.name} has no chat template, so it takes no system prompt.")
    defaults = ({} if served.sampling else SAMPLING) | ({} if served.chat else {"max_tokens": COMPLETION_TOKENS})
    return Conversation(model=served.name, chat=served.chat, system=system, settings=defaults | (given or {}))


def talk(api: Api, served: Served, conversation: Conversation, terminal: Terminal) -> None:
    """Read, answer and print until /bye or Ctrl-D."""
    stats = Stats()
    commands = Commands(served, api.url, conversation, stats)
    click.echo(f"{served.name} answers. /? lists the commands, Ctrl-C ends an answer, Ctrl-D or /bye the conversation.")
    if not served.chat:
        click.echo(
            f"It has no chat template: it continues each text alone, with at most {COMPLETION_TOKENS} tokens "
            "(/set max_tokens)."
        )
    while True:
        try:
            text, command = terminal.read()
        except KeyboardInterrupt:
            click.echo("Ctrl-D or /bye ends the conversation.")
            continue
        except EOFError:
            return
        if command:
            try:
                answer = commands.run(text)
            except SettingsError as error:
                answer = f"furrow: {error}"
            if answer is None:
                return
            click.echo(fit(answer))
        elif text.strip():
            with suppress(KeyboardInterrupt):  # a second Ctrl-C, after the one that ended the answer
                _turn(api, conversation, stats, text.strip())


def _turn(api: Api, conversation: Conversation, stats: Stats, text: str) -> None:
    """One answer, which Ctrl-C ends; what has come until then stays in the conversation."""
    with without_echo(), closing(api.answer(conversation, text)) as answer:
        stopped = False
        try:
            _print(answer)
        except KeyboardInterrupt:
            stopped = True
    click.echo()
    if answer.error:
        click.echo(fit(f"furrow: {answer.error}", sys.stderr), err=True)
        return
    if answer.text or not stopped:
        conversation.add(text, answer.text)
    stats.add(answer.figures)
    note = "stopped" if stopped else in_words(answer.figures)
    cut = ", cut at the limit of tokens" if answer.finish == "length" else ""
    click.secho(f"[{note}{cut}]", dim="NO_COLOR" not in os.environ)


def pieces_of(answer: Answer) -> Iterator[Piece]:
    """The pieces of an answer with text. While its request waits its place in the queue is shown on standard error."""
    with Waiting() as waiting:
        for piece in answer:
            if piece.position:
                wait = f", about {duration(piece.wait_ms)}" if piece.wait_ms else ""
                waiting.show(Stage(f"number {piece.position} in the queue{wait}"))
                continue
            waiting.hide()
            yield piece


def _print(answer: Answer) -> None:
    thinking = False
    for piece in pieces_of(answer):
        if thinking and not piece.reasoning:
            write("\n\n")
        thinking = piece.reasoning
        write(piece.text, dim=piece.reasoning)


def answer_once(api: Api, conversation: Conversation, text: str) -> None:
    """Print one answer on standard output, and its figures on standard error. Raises FurrowError."""
    terminal = sys.stdout.isatty()
    with closing(api.answer(conversation, text)) as answer:
        if terminal:
            _print(answer)
        else:
            for piece in pieces_of(answer):
                if not piece.reasoning:  # as it is: click.echo would leave out escape sequences
                    sys.stdout.write(piece.text)
                    sys.stdout.flush()
        if answer.text and not answer.text.endswith("\n"):
            click.echo()
    if answer.error:
        raise FurrowError(answer.error)
    cut = ", cut at the limit of tokens" if answer.finish == "length" else ""
    click.echo(f"furrow: {in_words(answer.figures)}{cut}", err=True)


def interactive() -> bool:
    """True where a person types and reads."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def terminal(keep_history: bool) -> Terminal:
    """The terminal with the commands' names."""
    return Terminal([*TABLE, *(f"/set {name}" for name in ("temperature", "max_tokens", "seed"))], keep_history)
