"""llama.cpp's llama-server: /completion with token ids.

Its stream has no event for a token that ends inside a UTF-8 character, so such a token would be lost. Whole answers
have all tokens (`return_tokens`). A sequence is therefore computed in short pieces, each a whole answer; the server's
prompt cache makes the next one cheap. Source: tools/server/server-context.cpp, `process_token`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from control.messages import TokenLogprobs
from worker.external.engine import EngineStats, ExternalEngine, Launch, Part, Piece, choice_grammar, options, whole

_CONTEXT = 4096
"""Positions of a sequence where neither the model's specification nor an option says how many."""


class LlamaServer(ExternalEngine):
    name = "llama-server"
    version = ("/props", "build_info")
    socket_option = "--host"
    context_option = "ctx-size"  # of all sequences together
    streams = False
    counts_alone = False  # its penalties count the prompt too
    sequences = ("parallel", 8)

    @classmethod
    def command(cls, launch: Launch) -> list[str]:
        context = (launch.context or _CONTEXT) * cls.most_sequences(launch.arguments)
        arguments = cls.with_defaults(launch, context)
        if all(device == "cpu" for device in launch.devices):
            arguments.setdefault("n-gpu-layers", "0")
        words = [*cls.listen(launch.address), *options(arguments)]
        adapters: list[str] = []
        if launch.adapters:
            files = [part for place in launch.adapters.values() for part in ("--lora", place)]
            adapters = ["--lora-init-without-apply", *files]
        return [
            "--model",
            str(launch.model),
            "--alias",
            launch.name,
            "--metrics",
            "--no-webui",
            "--offline",
            *adapters,
            *[part for word in words for part in word.split("=", 1)],  # it knows no --name=value
        ]

    @classmethod
    def context_length(cls, arguments: Mapping[str, str], context: int | None) -> int | None:
        if "ctx-size" not in arguments:
            return context or _CONTEXT
        return int(arguments["ctx-size"]) // cls.most_sequences(arguments)

    def request(self, piece: Piece) -> tuple[str, dict[str, Any]]:
        sampling = piece.sampling
        stops_at_eos = any(token in sampling.stop_ids for token in piece.eos_ids)
        body: dict[str, Any] = {
            "prompt": piece.tokens,
            "n_predict": min(piece.most, piece.least) if piece.least else piece.most,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "typical_p": sampling.typical_p,
            "repeat_penalty": sampling.repetition_penalty,
            "repeat_last_n": len(piece.tokens) + piece.most,  # all that the penalty counts
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "samplers": ["penalties", "temperature", "top_k", "top_p", "min_p", "typ_p"],
            "seed": piece.seed >> 31,  # 32 bits
            "ignore_eos": piece.least > 0 or not stops_at_eos,
            "logit_bias": [[token, value] for token, value in piece.bias.items()],
            "cache_prompt": True,
            "return_tokens": True,
            "stream": False,
        }
        if sampling.adapter:
            body["lora"] = [{"id": self.adapters.index(sampling.adapter), "scale": 1.0}]
        if sampling.logprobs is not None:
            body["n_probs"] = max(1, sampling.logprobs)  # 0 asks for none, the chosen token's neither
        if (grammar := sampling.grammar) is not None:
            match grammar.kind:
                case "json_schema":
                    body["json_schema"] = json.loads(grammar.text)
                case "choice":
                    body["grammar"] = choice_grammar(json.loads(grammar.text))
                case _:
                    body["json_schema"] = {"type": "object"}
        return "/completion", body

    def part(self, answer: dict[str, Any], have: int, piece: Piece) -> Part:
        tokens = [int(token) for token in answer.get("tokens") or ()]
        logprobs: list[TokenLogprobs] = []
        if piece.sampling.logprobs is not None:
            logprobs = [_logprobs(row, piece.sampling.logprobs) for row in answer.get("completion_probabilities") or ()]
        end = {"eos": "stop", "word": "stop", "limit": "length"}.get(str(answer.get("stop_type")), "length")
        if answer.get("truncated"):
            end = "context"
        cached = int((answer.get("timings") or {}).get("cache_n", 0))
        return Part(tokens, logprobs, end, cached=cached)

    def stats(self, samples: Mapping[str, float]) -> EngineStats:
        return EngineStats(
            kv_usage=samples.get("llamacpp:kv_cache_usage_ratio"),
            running=whole(samples, "llamacpp:requests_processing"),
            waiting=whole(samples, "llamacpp:requests_deferred"),
        )


def _logprobs(row: dict[str, Any], most: int) -> TokenLogprobs:
    """Of the model itself, before penalties, bias and sampling."""
    top = [(int(candidate["id"]), float(candidate["logprob"])) for candidate in row.get("top_logprobs") or ()]
    return TokenLogprobs(float(row["logprob"]), top[:most])
