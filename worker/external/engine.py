"""The interface of an external engine to its leader: a command, a readiness, and a request by token ids with its
answers.

An engine is one module. It knows its HTTP interface and nothing of Redis, requests or epochs.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from control.messages import Sampling, TokenLogprobs

ENGINE_RANK = 1
"""The place of an engine's process beside its leader, which is rank 0."""
ENGINE_LOST = "engine_lost"
"""Kind of poison where an engine does not answer any more."""


@dataclass(frozen=True)
class Address:
    """The address of an engine: a Unix socket in a folder of its user alone, or a port of this host."""

    socket: str = ""
    url: str = ""

    @classmethod
    def parse(cls, text: str) -> Address:
        """Of `str(address)`."""
        return cls(socket=text.removeprefix("unix:")) if text.startswith("unix:") else cls(url=text)

    def __str__(self) -> str:
        return f"unix:{self.socket}" if self.socket else self.url

    @property
    def base_url(self) -> str:
        """The base URL for an HTTP client; the socket is an argument of its own."""
        return "http://engine" if self.socket else self.url


@dataclass(frozen=True)
class Launch:
    """The model and the options with which an engine is started."""

    model: Path
    """A folder, or the first GGUF file."""
    name: str
    address: Address
    devices: tuple[str, ...]
    """One for each part of the model: `cpu`, or `cuda:0`, …"""
    arguments: Mapping[str, str]
    """Options that the model names, checked by `control.engines.check_engine`."""
    context: int | None = None
    """Most positions of a sequence; None: the model's own."""
    memory: int | None = None
    """Bytes that it may take; None: not limited."""
    adapters: Mapping[str, str] = field(default_factory=dict[str, str])
    """Folders or files of low-rank adapters, by name."""
    embeds: bool = False
    """True if the model gives vectors."""
    by_module: bool = False
    """True if a Python module is run, and not the engine's program."""


@dataclass(frozen=True)
class Piece:
    """A part of a sequence that an engine computes in one request."""

    tokens: list[int]
    """All before it: the prompt and what was generated."""
    sampling: Sampling
    most: int
    """Tokens that it has at most, from 1 on."""
    least: int = 0
    """So many of its first tokens are no stop ids."""
    seed: int = 0
    """In [0, 2**63)."""
    bias: Mapping[int, float] = field(default_factory=dict[int, float])
    """Added to the logits, by token."""
    counts: bool = True
    """True if the engine itself applies the presence and the frequency penalty; False where `bias` has them."""
    salt: str = ""
    """Only pieces with the same salt share prefixes, where the engine shares any."""
    eos_ids: tuple[int, ...] = ()
    embeds: bool = False
    """True if a vector of `tokens` is wanted, and no further token."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of an answer of the engine: the next tokens of a piece, in order, each once."""

    tokens: list[int]
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    """One for each token where the request wants them."""
    end: str = ""
    """The end of the piece in the engine's word; empty while it goes on."""
    error: str = ""
    """The engine's message of failure; empty for a piece that did not fail."""
    vector: list[float] = field(default_factory=list[float])
    """Of a piece that embeds."""
    cached: int = 0
    """Tokens before the piece whose KV was there already, in the first part that says so."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """An engine's own gauges; None where it tells nothing."""

    kv_usage: float | None = None
    """Part of its KV memory in use, 0 to 1."""
    running: int | None = None
    waiting: int | None = None
    prefix_hits: int | None = None
    """Tokens that it found in its prefix cache since its start; None also where its answers say how many."""


class ExternalEngine(ABC):
    """An external engine's interface. An object of it serves one piece after another; it has no state but its model."""

    name: ClassVar[str]
    """As in `control.engines.ENGINES`."""
    health: ClassVar[str] = "/health"
    """Path that answers 200 once the model is loaded."""
    metrics: ClassVar[str] = "/metrics"
    version: ClassVar[tuple[str, str]]
    """Path of a JSON object, and its field with the engine's version."""
    streams: ClassVar[bool] = True
    """False where only a whole answer has all its tokens: then pieces are short."""
    counts_alone: ClassVar[bool] = True
    """True if its presence and frequency penalties count generated tokens alone, as OpenAI's do."""
    socket_option: ClassVar[str] = ""
    """Its option for a Unix socket to listen on; empty for an engine that can't."""
    context_option: ClassVar[str]
    """Its option for the most positions of a sequence."""
    sequences: ClassVar[tuple[str, int]]
    """Its option for the number of sequences that it runs at once, and the default."""

    def __init__(self, model: str, adapters: Sequence[str] = ()) -> None:
        """`model`: the name by which the engine knows its model. `adapters`: those of its launch, in their order."""
        self.model = model
        self.adapters = tuple(adapters)

    @classmethod
    @abstractmethod
    def command(cls, launch: Launch) -> list[str]:
        """The arguments behind the program's, or the module's, name."""

    @classmethod
    def environment(cls, launch: Launch) -> dict[str, str]:
        """Variables beside those of the worker. No engine looks for files on a network, or tells anybody of its use."""
        gpus = [device.partition(":")[2] for device in launch.devices if device != "cpu"]
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
        return {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "DO_NOT_TRACK": "1", **visible}

    @abstractmethod
    def request(self, piece: Piece) -> tuple[str, dict[str, Any]]:
        """Path and JSON body of the request for a piece."""

    @abstractmethod
    def part(self, answer: dict[str, Any], have: int, piece: Piece) -> Part:
        """The news in one event of the stream, or in the whole answer; `have` tokens of the piece are here already."""

    def stats(self, samples: Mapping[str, float]) -> EngineStats:
        """The gauges among the samples of its /metrics, each summed over its labels."""
        return EngineStats()

    @classmethod
    def context_length(cls, arguments: Mapping[str, str], context: int | None) -> int | None:
        """Most positions of a sequence with these options, where the specification has `context`; None: the model's
        own."""
        return int(arguments[cls.context_option]) if cls.context_option in arguments else context

    @classmethod
    def listen(cls, address: Address) -> list[str]:
        """The options by which it listens at an address."""
        if address.socket:
            return [f"{cls.socket_option}={address.socket}"]
        return ["--host=127.0.0.1", f"--port={address.url.rpartition(':')[2]}"]

    @classmethod
    def with_defaults(cls, launch: Launch, context: int | None) -> dict[str, str]:
        """The options that the model names, with those for the number of sequences and the `context` where it names
        none; None: the engine's own."""
        name, most = cls.sequences
        arguments = {name: str(most), **launch.arguments}
        if context is not None:
            arguments.setdefault(cls.context_option, str(context))
        return arguments

    @classmethod
    def most_sequences(cls, arguments: Mapping[str, str]) -> int:
        """The number of sequences that it runs at once."""
        option, default = cls.sequences
        return int(arguments.get(option, default))


def options(arguments: Mapping[str, str]) -> list[str]:
    """Options on a command line, each in one word."""
    words: list[str] = []
    for name, value in sorted(arguments.items()):
        if value == "true":
            words.append(f"--{name}")
        elif value != "false":
            words.append(f"--{name}={value}")
    return words


def whole(samples: Mapping[str, float], name: str) -> int | None:
    """A sample that counts; None where there is none."""
    return int(samples[name]) if name in samples else None


def seed_of(seed: str, choice: int, position: int) -> int:
    """The seed of a piece that begins at `position` of a choice's output, in [0, 2**63). The same seed for a later
    piece would repeat the noise of the first."""
    digest = hashlib.blake2b(f"{seed}/{choice}/{position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def choice_grammar(texts: list[str]) -> str:
    """GBNF for one of these texts."""
    return "root ::= " + " | ".join(_quoted(text) for text in texts)


def _quoted(text: str) -> str:
    escapes = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    return '"' + "".join(escapes.get(character, character) for character in text) + '"'
