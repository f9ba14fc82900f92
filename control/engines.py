"""External engines: which there are, what requests each can serve, and which of its options a model may name.

Furrow's own engine is the default. An external one computes tokens for a leader that logs them: queues, recovery,
limits, stop strings and ends stay Furrow's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from control.errors import RequestError, SettingsError
from control.messages import GrammarKind, Sampling

OWN = "furrow"
"""The engine of models that name none: the ranks of this package."""

Kind = Literal["int", "float", "word", "flag"]
"""The form of an option's value; `flag` is `true` or `false`."""

_FORMS: Mapping[Kind, re.Pattern[str]] = {
    "int": re.compile(r"-?\d{1,12}"),
    "float": re.compile(r"\d{0,6}(\.\d{1,9})?"),
    "word": re.compile(r"[A-Za-z0-9][A-Za-z0-9_.,:-]{0,63}"),
    "flag": re.compile(r"true|false"),
}


@dataclass(frozen=True)
class EngineRecord:
    """One external engine, as the control plane knows it."""

    name: str
    title: str
    program: str
    """The default of `--engine-command`: a program on the PATH."""
    module: str
    """The Python module that `--engine-python` runs; empty for a program that is not Python's."""
    gguf: bool
    """True if its models are GGUF files, False if they are folders with safetensors."""
    tried: str
    """The version that was run under Furrow, and where."""
    tried_version: str
    """The version of it, or its beginning; empty where no real one was run."""
    options: Mapping[str, Kind]
    """Options that a model may name. Those for hosts, ports, files, code and secrets are never among them."""
    embeds: bool
    """True if Furrow reads vectors from it."""
    grammars: frozenset[GrammarKind]
    """The kinds of grammar to which it keeps."""
    refused: Mapping[str, str] = field(default_factory=dict[str, str])
    """Fields of `Sampling` that it can't serve as Furrow promises → why."""
    not_with_grammar: frozenset[str] = frozenset({"reasoning"})
    """Fields for which Furrow cuts an answer into several requests: no engine goes on within a grammar."""


_UNKNOWN_COUNT = "it counts only what it has generated itself, which a recovery would change"
_NO_TOKENS = "its HTTP interface takes no sequences of token ids for it"
_NOT_THERE = "it has no such parameter"
_NOT_PASSED = "Furrow does not pass it on"
_LLAMA_CPP_SAMPLERS = ("dry_multiplier", "xtc_probability", "top_n_sigma", "dynatemp_range")

ENGINES: Mapping[str, EngineRecord] = {
    "vllm": EngineRecord(
        name="vllm",
        title="vLLM",
        program="vllm",
        module="vllm.entrypoints.openai.api_server",
        gguf=False,
        tried="vLLM 0.32 on CPUs",
        tried_version="0.32.",
        options={
            "block-size": "int",
            "cpu-offload-gb": "float",
            "dtype": "word",
            "enable-chunked-prefill": "flag",
            "enable-expert-parallel": "flag",
            "enable-prefix-caching": "flag",
            "enforce-eager": "flag",
            "gpu-memory-utilization": "float",
            "kv-cache-dtype": "word",
            "max-lora-rank": "int",
            "max-loras": "int",
            "max-model-len": "int",
            "max-num-batched-tokens": "int",
            "max-num-seqs": "int",
            "pipeline-parallel-size": "int",
            "quantization": "word",
            "tokenizer-mode": "word",
        },
        embeds=True,
        grammars=frozenset({"json_schema", "json_object", "regex", "lark", "choice"}),
        refused={
            "typical_p": _NOT_THERE,
            "bad_words": _NO_TOKENS,
            "allowed_token_ids": _NOT_PASSED,
            **dict.fromkeys(_LLAMA_CPP_SAMPLERS, _NOT_THERE),
            "prompt_logprobs": "Furrow does not read them from it yet",
        },
    ),
    "sglang": EngineRecord(
        name="sglang",
        title="SGLang",
        program="",
        module="sglang.launch_server",
        gguf=False,
        tried="a scripted server of its shape alone",
        tried_version="",
        options={
            "attention-backend": "word",
            "chunked-prefill-size": "int",
            "context-length": "int",
            "disable-cuda-graph": "flag",
            "disable-radix-cache": "flag",
            "dtype": "word",
            "kv-cache-dtype": "word",
            "max-lora-rank": "int",
            "max-loras-per-batch": "int",
            "max-running-requests": "int",
            "mem-fraction-static": "float",
            "quantization": "word",
            "schedule-policy": "word",
        },
        embeds=True,
        grammars=frozenset({"json_schema", "json_object", "regex", "choice"}),
        refused={
            "typical_p": _NOT_THERE,
            "bad_words": _NO_TOKENS,
            "allowed_token_ids": _NOT_THERE,
            **dict.fromkeys(_LLAMA_CPP_SAMPLERS, _NOT_THERE),
            "repetition_penalty": _UNKNOWN_COUNT,
            "prompt_logprobs": "Furrow does not read them from it yet",
        },
    ),
    "llama-server": EngineRecord(
        name="llama-server",
        title="llama.cpp's llama-server",
        program="llama-server",
        module="",
        gguf=True,
        tried="llama.cpp 0c1e57098 on CPUs",
        tried_version="b1-0c1e570",
        options={
            "batch-size": "int",
            "cache-type-k": "word",
            "cache-type-v": "word",
            "cpu-moe": "flag",
            "ctx-size": "int",
            "flash-attn": "word",
            "main-gpu": "int",
            "mlock": "flag",
            "n-cpu-moe": "int",
            "n-gpu-layers": "int",
            "no-mmap": "flag",
            "parallel": "int",
            "split-mode": "word",
            "tensor-split": "word",
            "threads": "int",
            "threads-batch": "int",
            "ubatch-size": "int",
        },
        embeds=False,
        grammars=frozenset({"json_schema", "json_object", "choice"}),
        refused={
            "bad_words": _NO_TOKENS,
            "allowed_token_ids": _NOT_THERE,
            **dict.fromkeys(_LLAMA_CPP_SAMPLERS, _NOT_PASSED),
            "prompt_logprobs": "it gives none",
        },
        not_with_grammar=frozenset({"reasoning", "presence_penalty", "frequency_penalty", "min_tokens"}),
    ),
}


def how_to_offer(engine: str) -> str:
    """Advice for a host that is to offer an engine."""
    return (
        f"start a worker with --engine-command {engine}=PROGRAM, --engine-python {engine}=PYTHON or --engine-url "
        f"{engine}=URL, or put its program on the worker's PATH"
    )


def check_engine(engine: str, arguments: Mapping[str, str]) -> None:
    """Raise SettingsError for an engine that is unknown, or an option of it that a model may not name."""
    if engine == OWN:
        if arguments:
            raise SettingsError(
                f"--engine-arg {next(iter(arguments))}: Furrow's own engine takes none. Name another engine with "
                f"--engine {'|'.join(ENGINES)}, or leave --engine-arg out."
            )
        return
    if engine not in ENGINES:
        raise SettingsError(f"--engine {engine!r} is unknown: use {', '.join([OWN, *ENGINES])}.")
    options = ENGINES[engine].options
    for name, value in arguments.items():
        if name not in options:
            raise SettingsError(
                f"--engine-arg {name}: a model may not name this option of {engine}. It may name: "
                f"{', '.join(sorted(options))}."
            )
        kind = options[name]
        if not _FORMS[kind].fullmatch(value):
            raise SettingsError(f"--engine-arg {name}={value!r} is no {kind}.")


_ADAPTER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
MOST_ADAPTERS = 64
"""Of a model."""


def check_adapters(engine: str, adapters: Mapping[str, str]) -> None:
    """Raise SettingsError for adapters of Furrow's own engine, too many, a name or a place that can't be used."""
    if not adapters:
        return
    if engine == OWN:
        raise SettingsError(
            f"--adapter {next(iter(adapters))}: Furrow's own engine adds none. Merge it into the model's weights, or "
            f"name an engine with --engine {'|'.join(ENGINES)}."
        )
    if len(adapters) > MOST_ADAPTERS:
        raise SettingsError(f"{len(adapters)} adapters are named; a model may have {MOST_ADAPTERS}.")
    for name, place in adapters.items():
        if not _ADAPTER.fullmatch(name):
            raise SettingsError(
                f"--adapter {name!r} is no name: use letters, digits, '.', '_' and '-', 64 at most. Clients write "
                "MODEL:NAME."
            )
        if not place.startswith("/") or "," in place or "=" in place:
            raise SettingsError(
                f"--adapter {name}={place}: give an absolute path of the hosts, without commas and equals signs."
            )


def named_values(option: str, texts: Sequence[str], flag: str = "") -> dict[str, str]:
    """`name=value` of each text of a repeatable option; a name alone has the value `flag`. Raises SettingsError for one
    without a value, and for a name that is given twice."""
    values: dict[str, str] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if not name or not (value or flag):
            raise SettingsError(f"{option} {text!r}: give it as NAME=VALUE.")
        if name in values:
            raise SettingsError(f"{option} {name} is given twice.")
        values[name] = value or flag
    return values


def parse_adapters(texts: Sequence[str]) -> dict[str, str]:
    """`name=path` of each --adapter, the paths made absolute. Raises SettingsError."""
    places = named_values("--adapter", texts)
    return {name: str(Path(place).expanduser().absolute()) for name, place in places.items()}


def adapter_in(model: str, adapters: Sequence[str]) -> str:
    """The adapter that `MODEL:NAME` means, of these; empty for a name without one."""
    name = model.rpartition(":")[2]
    return name if name != model and name in adapters else ""


def parse_arguments(texts: Sequence[str]) -> dict[str, str]:
    """`name=value` of each --engine-arg, leading dashes allowed; a name alone is a flag. Raises SettingsError."""
    return named_values("--engine-arg", [text.lstrip("-") for text in texts], flag="true")


def refuse(engine: str, sampling: Sampling, *, images: bool = False) -> None:
    """Raise RequestError naming the engine and the field of a request that it can't serve as Furrow promises."""
    if engine == OWN:
        return
    described = ENGINES[engine]
    default = Sampling(max_tokens=1)
    for name, why in described.refused.items():
        if getattr(sampling, name) != getattr(default, name):
            _refuse(described, name, why)
    if images:
        _refuse(described, "images", "it takes none beside token ids, or none was tried")
    grammar = sampling.grammar
    if grammar is None:
        return
    if grammar.kind not in described.grammars:
        kinds = ", ".join(sorted(described.grammars))
        _refuse(described, "grammar", f"of the kinds of grammar it keeps to {kinds}, not to {grammar.kind}")
    for name in sorted(described.not_with_grammar):
        if getattr(sampling, name) != getattr(default, name):
            _refuse(described, name, "it can't be kept together with a grammar there")


def _refuse(engine: EngineRecord, field_name: str, why: str) -> None:
    raise RequestError(
        f"This model is served by {engine.title}, which can't take '{field_name}': {why}. Leave it out, or use a model "
        "that Furrow's own engine serves.",
        param=field_name,
        code="unsupported_by_engine",
    )
