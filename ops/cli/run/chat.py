"""`furrow run` on a terminal and in a pipe: lines that are typed, and a conversation of them and their answers."""

from __future__ import annotations

import os
import sys
import termios
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import click
from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.history import FileHistory, History, InMemoryHistory

from control.errors import FurrowError, SettingsError
from control.operations.local_farms import state_folder
from ops.cli.progress import Stage, Waiting
from ops.cli.run.answer import Piece, StreamedAnswer
from ops.cli.run.commands import TABLE, Commands, Stats, in_words
from ops.cli.run.conversation import Conversation
from ops.cli.run.served import Api, ServedModel
from ops.cli.tables import duration, fit, plain

PROMPT = ">>> "
CONTINUED = "... "
QUOTES = '"""'
LARGEST_HISTORY = 2**20
"""Bytes of the file, of which the newer half is kept beyond that."""


class Input(NamedTuple):
    """The typed text, without triple quotes; `command`: it begins with a slash, and not with a quote."""

    text: str
    command: bool


class Terminal:
    """Reads what the user types and prints what the model answers."""

    def __init__(self, commands: Sequence[str], keep_history: bool = True) -> None:
        completer = WordCompleter(list(commands), sentence=True)
        self._session: PromptSession[str] = PromptSession(
            history=_history() if keep_history else InMemoryHistory(),
            completer=completer,
            complete_while_typing=False,
            enable_history_search=True,
        )

    def read(self) -> Input:
        """One input; texts between triple quotes have several lines. Raises EOFError for Ctrl-D, KeyboardInterrupt for
        Ctrl-C."""
        line = self._session.prompt(PROMPT)
        command = line.startswith("/")
        if line.count(QUOTES) != 1:
            return Input(line.replace(QUOTES, ""), command)
        lines = [line]
        while QUOTES not in lines[-1] or len(lines) == 1:
            lines.append(self._session.prompt(CONTINUED))
        return Input("\n".join(lines).replace(QUOTES, "").strip("\n"), command)


def write(text: str, dim: bool = False) -> None:
    """Print a part of an answer."""
    clean = plain(text)
    if clean:
        sys.stdout.write(click.style(clean, dim=True) if dim and "NO_COLOR" not in os.environ else clean)
        sys.stdout.flush()


@contextmanager
def without_echo() -> Generator[None]:
    """Keys that are pressed during an answer don't appear in it. Ctrl-C works, and the keys are read afterwards."""
    try:
        before = termios.tcgetattr(sys.stdin.fileno())
    except (OSError, ValueError, termios.error):
        yield
        return
    silent = [*before[:3], before[3] & ~(termios.ECHO | termios.ECHONL), *before[4:]]
    termios.tcsetattr(sys.stdin.fileno(), termios.TCSANOW, silent)
    try:
        yield
    finally:
        with suppress(OSError, termios.error):
            termios.tcsetattr(sys.stdin.fileno(), termios.TCSANOW, before)


def _history() -> History:
    """In a file that only this user can read, else in memory."""
    path = state_folder() / "run-history"
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
        path.chmod(0o600)
        _shorten(path)
    except OSError:
        return InMemoryHistory()
    return FileHistory(str(path))


def _shorten(path: Path) -> None:
    size = path.stat().st_size
    if size <= LARGEST_HISTORY:
        return
    with path.open("r+b") as file:
        file.seek(size - LARGEST_HISTORY // 2)
        newer = file.read().partition(b"\n\n")[2]  # whole entries: an empty line ends one
        file.seek(0)
        file.write(newer)
        file.truncate()


# --- the conversation -------------------------------------------------------------------------------------------------


COMPLETION_TOKENS = 256
"""max_tokens for a model without a chat template: many of them never end by themselves."""
SAMPLING = {"temperature": 0.8, "top_p": 0.95, "min_p": 0.05}
"""llama.cpp's, for a model without sampling defaults: OpenAI's temperature of 1 is too high for small models."""


def begin(served: ServedModel, system: str = "", assigned: dict[str, Any] | None = None) -> Conversation:
    """An empty conversation with the settings that were given. Raises SettingsError for a system prompt in vain."""
    if system and not served.chat:
        raise SettingsError(f"{served.name} has no chat template, so it takes no system prompt.")
    defaults = ({} if served.sampling else SAMPLING) | ({} if served.chat else {"max_tokens": COMPLETION_TOKENS})
    return Conversation(model=served.name, chat=served.chat, system=system, settings=defaults | (assigned or {}))


def talk(api: Api, served: ServedModel, conversation: Conversation, terminal: Terminal) -> None:
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


def pieces_of(answer: StreamedAnswer) -> Iterator[Piece]:
    """The pieces of an answer with text. While its request waits its place in the queue is shown on standard error."""
    with Waiting() as waiting:
        for piece in answer:
            if piece.position:
                wait = f", about {duration(piece.wait_ms)}" if piece.wait_ms else ""
                waiting.show(Stage(f"number {piece.position} in the queue{wait}"))
                continue
            waiting.hide()
            yield piece


def _print(answer: StreamedAnswer) -> None:
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
