"""The input and output of every engine. Standard library only: the interpreters of other engines import it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol


class Unavailable(Exception):
    """This engine can't be measured here: not installed, or it refuses what it is asked for. Its text says why."""


class Failed(Exception):
    """The engine began and broke; its text says how."""


@dataclass(slots=True)
class Stream:
    """One answer: when its prompt was given, when each token was there (seconds of the machine's monotonic clock,
    which all processes share), and the tokens' ids."""

    sent: float
    stamps: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def add(self, at: float, *tokens: int) -> None:
        self.tokens.extend(tokens)
        self.stamps.extend([at] * len(tokens))


@dataclass(frozen=True, slots=True)
class Row:
    """An engine with one kind of weights, written ENGINE:WEIGHTS."""

    engine: str
    weights: str

    def __str__(self) -> str:
        return f"{self.engine}:{self.weights}"


@dataclass(frozen=True, slots=True)
class Setup:
    """The model and the resources of an engine. `folder` has the model in the format of transformers."""

    folder: Path
    weights: str
    gguf: Path | None = None
    """The same weights for llama.cpp; for Furrow only where its row is such a file."""
    device: str = "cpu"
    threads: int = 1
    tp: int = 1
    streams: int = 1
    """The most that will run at a time."""
    kv_tokens: int = 1024
    """Positions that all of them may come to need at a time."""
    context: int = 1024
    """Positions that one of them may come to need."""

    @property
    def divided_context(self) -> int:
        """The context of an engine that divides it evenly between its streams, in steps of 256."""
        return self.streams * -(-(self.context + 1) // 256) * 256

    def blocks(self, page: int) -> int:
        """Of a paged KV memory: one more for each stream's last, unfilled page, and one to spare."""
        return -(-self.kv_tokens // page) + self.streams + 1

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"folder": str(self.folder), "gguf": str(self.gguf) if self.gguf else None}

    @classmethod
    def of_json(cls, fields: dict[str, Any]) -> Setup:
        paths: dict[str, Any] = {name: Path(fields[name]) if fields[name] else None for name in ("folder", "gguf")}
        return cls(**fields | paths)


class Loop(Protocol):
    """A loaded engine."""

    def run(self, prompts: list[list[int]], tokens: int) -> list[Stream]:
        """Generate `tokens` greedily for each prompt, all at once; in the order of the prompts. Raises Failed."""
        ...


class Engine(Loop, Protocol):
    """An engine in processes of its own, between `start` and `stop`."""

    def start(self) -> float:
        """Load the model; the moment at which its first process was started. Raises Unavailable or Failed."""
        ...

    def stop(self) -> None:
        """End every process; harmless after a failed start."""
        ...


LoadEngine = Callable[[Setup], Loop]
"""The `load` of a module of `loops`. Raises Unavailable, or ImportError where its engine is not installed."""
