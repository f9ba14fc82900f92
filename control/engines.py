"""External engines: which there are, what requests each can serve, and which of its options a model may name.

Furrow's own engine is the default. An external one computes tokens for a leader that logs them: queues, recovery,
limits, stop strings and ends stay Furrow's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
class ExternalEngine:
    """One external engine, as the control plane knows it."""

    name: str
    title: str
    program: str
    """What `--engine-command` names where it is not given: a program on the PATH."""
    module: str
    """The Python module that `--engine-python` runs; empty for a program that is not Python's."""
    gguf: bool
    """True if its models are GGUF files, False if they are folders with safetensors."""
    tried: str
    """What was run under Furrow."""
    options: Mapping[str, Kind]
    """Options that a model may name. Those for hosts, ports, files, code and secrets are never among them."""
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

ENGINES: Mapping[str, ExternalEngine] = {
    "vllm": ExternalEngine(
        name="vllm",
        title="vLLM",
        program="vllm",
        module="vllm.entrypoints.openai.api_server",
        gguf=False,
        tried="vLLM 0.32 on CPUs",
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
            "max-model-len": "int",
            "max-num-batched-tokens": "int",
            "max-num-seqs": "int",
            "pipeline-parallel-size": "int",
            "quantization": "word",
            "tokenizer-mode": "word",
        },
        grammars=frozenset({"json_schema", "json_object", "regex", "lark", "choice"}),
        refused={
            "typical_p": _NOT_THERE,
            "bad_words": _NO_TOKENS,
            "allowed_token_ids": _NOT_PASSED,
            **dict.fromkeys(_LLAMA_CPP_SAMPLERS, _NOT_THERE),
            "prompt_logprobs": "Furrow does not read them from it yet",
        },
    ),
    "sglang": ExternalEngine(
        name="sglang",
        title="SGLang",
        program="",
        module="sglang.launch_server",
        gguf=False,
        tried="a scripted server of its shape alone",
        options={
            "attention-backend": "word",
            "chunked-prefill-size": "int",
            "context-length": "int",
            "disable-cuda-graph": "flag",
            "disable-radix-cache": "flag",
            "dtype": "word",
            "kv-cache-dtype": "word",
            "max-running-requests": "int",
            "mem-fraction-static": "float",
            "quantization": "word",
            "schedule-policy": "word",
        },
        grammars=frozenset({"json_schema", "json_object", "regex", "choice"}),
        refused={
            "typical_p": _NOT_THERE,
            "bad_words": _NO_TOKENS,
            "allowed_token_ids": _NOT_THERE,
            **dict.fromkeys(_LLAMA_CPP_SAMPLERS, _NOT_THERE),
            "repetition_penalty": _UNKNOWN_COUNT,
            "logprobs": "Furrow does not read them from it yet",
            "prompt_logprobs": "Furrow does not read them from it yet",
        },
    ),
    "llama-server": ExternalEngine(
        name="llama-server",
        title="llama.cpp's llama-server",
        program="llama-server",
        module="",
        gguf=True,
        tried="llama.cpp 0c1e57098 on CPUs",
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
        grammars=frozenset({"json_schema", "json_object", "choice"}),
        refused={
            "bad_words": _NO_TOKENS,
            "allowed_token_ids": _NOT_THERE,
            **dict.fromkeys(_LLAMA_CPP_SAMPLERS, _NOT_PASSED),
            "logprobs": "Furrow does not read them from it yet",
            "prompt_logprobs": "it gives none",
        },
        not_with_grammar=frozenset({"reasoning", "presence_penalty", "frequency_penalty", "min_tokens"}),
    ),
}


def how_to_offer(engine: str) -> str:
    """How a host offers an engine, as advice."""
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


def parse_arguments(texts: Sequence[str]) -> dict[str, str]:
    """`name=value` of each --engine-arg, leading dashes allowed; a name alone is a flag. Raises SettingsError for one
    that is given twice."""
    arguments: dict[str, str] = {}
    for text in texts:
        name, _, value = text.lstrip("-").partition("=")
        if name in arguments:
            raise SettingsError(f"--engine-arg {name} is given twice.")
        arguments[name] = value or "true"
    return arguments


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
        _refuse(described, "images", "images are served by Furrow's own engine alone")
    grammar = sampling.grammar
    if grammar is None:
        return
    if grammar.kind not in described.grammars:
        kinds = ", ".join(sorted(described.grammars))
        _refuse(described, "grammar", f"of the kinds of grammar it keeps to {kinds}, not to {grammar.kind}")
    for name in sorted(described.not_with_grammar):
        if getattr(sampling, name) != getattr(default, name):
            _refuse(described, name, "it can't be kept together with a grammar there")


def _refuse(engine: ExternalEngine, field_name: str, why: str) -> None:
    raise RequestError(
        f"This model is served by {engine.title}, which can't take '{field_name}': {why}. Leave it out, or use a model "
        "that Furrow's own engine serves.",
        param=field_name,
        code="unsupported_by_engine",
    )
