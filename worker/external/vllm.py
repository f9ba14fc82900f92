"""vLLM: /v1/completions of `vllm serve`, with token ids in and out.

`return_token_ids` gives each event's ids. Without `--generation-config vllm` defaults of the model would apply in
silence. Source: vllm/entrypoints/openai/completion of vLLM 0.32.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from control.messages import Grammar, TokenLogprobs
from worker.external.engine import EngineStats, ExternalEngine, Launch, Part, Piece, options, whole

_PREFIX = "token_id:"
"""Before the number of a token in log probabilities, with `return_tokens_as_token_ids`."""
_LEAST_KV = 1 << 30
_PROCESSES = 3 << 29
"""Memory of its processes on CPUs beside weights and KV memory: libraries, tokenizers, activations."""


class Vllm(ExternalEngine):
    name = "vllm"
    version = ("/version", "version")
    socket_option = "--uds"
    context_option = "max-model-len"
    sequences = ("max-num-seqs", 128)

    @classmethod
    def command(cls, launch: Launch) -> list[str]:
        arguments = cls.with_defaults(launch, launch.context)
        if len(launch.devices) > 1:
            arguments["tensor-parallel-size"] = str(len(launch.devices))
        adapters: list[str] = []
        if launch.adapters:
            arguments.setdefault("max-loras", str(len(launch.adapters)))
            modules = [f"{_adapted(launch.name, name)}={place}" for name, place in launch.adapters.items()]
            adapters = ["--enable-lora", "--lora-modules", *modules]
        return [
            *([f"--model={launch.model}"] if launch.by_module else ["serve", str(launch.model)]),
            *cls.listen(launch.address),
            f"--served-model-name={launch.name}",
            "--generation-config=vllm",
            "--load-format=safetensors",
            '--structured-outputs-config={"backend": "guidance"}',
            "--return-tokens-as-token-ids",
            "--disable-uvicorn-access-log",
            "--no-enable-log-requests",
            *options(arguments),
            *adapters,
        ]

    @classmethod
    def environment(cls, launch: Launch) -> dict[str, str]:
        variables = {**super().environment(launch), "VLLM_NO_USAGE_STATS": "1", "VLLM_PLUGINS": ""}
        if launch.memory is not None and "cpu" in launch.devices:
            weights = sum(file.stat().st_size for file in launch.model.glob("*.safetensors"))
            kv_bytes = max(_LEAST_KV, launch.memory - _PROCESSES - 2 * weights)
            variables["VLLM_CPU_KVCACHE_SPACE"] = str(kv_bytes >> 30)
        return variables

    def request(self, piece: Piece) -> tuple[str, dict[str, Any]]:
        sampling = piece.sampling
        if piece.embeds:
            return "/v1/embeddings", {"model": self.model, "input": piece.tokens}
        body: dict[str, Any] = {
            "model": _adapted(self.model, sampling.adapter) if sampling.adapter else self.model,
            "prompt": piece.tokens,
            "max_tokens": piece.most,
            "min_tokens": piece.least,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "seed": piece.seed,
            "stop_token_ids": sampling.stop_ids,
            "ignore_eos": True,  # Furrow's stop ids have the model's own, unless the request ignores them
            "add_special_tokens": False,
            "skip_special_tokens": False,
            "return_token_ids": True,
            "stream": True,
        }
        if piece.counts:
            body["presence_penalty"] = sampling.presence_penalty
            body["frequency_penalty"] = sampling.frequency_penalty
        if piece.bias:
            body["logit_bias"] = {str(token): value for token, value in piece.bias.items()}
        if piece.salt:
            body["cache_salt"] = hashlib.sha256(piece.salt.encode()).hexdigest()
        if sampling.logprobs is not None:
            body["logprobs"] = sampling.logprobs
            body["return_tokens_as_token_ids"] = True
        if sampling.grammar is not None:
            body["structured_outputs"] = _structured(sampling.grammar)
        return "/v1/completions", body

    def part(self, answer: dict[str, Any], have: int, piece: Piece) -> Part:
        if piece.embeds:
            return Part([], vector=answer["data"][0]["embedding"], end="stop")
        if not answer.get("choices"):
            return Part([])
        choice = answer["choices"][0]
        tokens = [int(token) for token in choice.get("token_ids") or ()]
        logprobs: list[TokenLogprobs] = []
        if piece.sampling.logprobs is not None and choice.get("logprobs"):
            logprobs = _logprobs(choice["logprobs"], piece.sampling.logprobs)
        return Part(tokens, logprobs, choice.get("finish_reason") or "")

    def stats(self, samples: Mapping[str, float]) -> EngineStats:
        return EngineStats(
            kv_usage=samples.get("vllm:kv_cache_usage_perc"),
            running=whole(samples, "vllm:num_requests_running"),
            waiting=whole(samples, "vllm:num_requests_waiting"),
            prefix_hits=whole(samples, "vllm:prefix_cache_hits_total"),
        )


def _adapted(model: str, adapter: str) -> str:
    """The name by which vLLM knows the model with an adapter."""
    return f"{model}:{adapter}"


def _structured(grammar: Grammar) -> dict[str, Any]:
    match grammar.kind:
        case "json_schema":
            return {"json": json.loads(grammar.text)}
        case "json_object":
            return {"json_object": True}
        case "regex":
            return {"regex": grammar.text}
        case "choice":
            return {"choice": json.loads(grammar.text)}
        case "lark":
            return {"grammar": grammar.text}


def _logprobs(logprobs: dict[str, Any], most: int) -> list[TokenLogprobs]:
    """Of each token; the chosen one is among the most likely ones that vLLM lists, and so one more than `most`."""
    tops: list[dict[str, float] | None] = logprobs.get("top_logprobs") or []
    rows: list[TokenLogprobs] = []
    for place, logprob in enumerate(logprobs["token_logprobs"]):
        top = (tops[place] if place < len(tops) else None) or {}
        ranked = [(int(name.removeprefix(_PREFIX)), value) for name, value in top.items()]
        ranked.sort(key=lambda candidate: -candidate[1])
        rows.append(TokenLogprobs(float(logprob), ranked[:most]))
    return rows
