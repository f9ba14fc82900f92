"""SGLang: /generate with `input_ids`. Its stream is cumulative unless the server was started otherwise.

Source: sglang/srt/managers/io_struct.py and tokenizer_manager.py. No SGLang has run here: the tests have a server of
its shape.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from control.messages import TokenLogprobs
from worker.external.engine import EngineStats, ExternalEngine, Launch, Part, Piece, options, whole


class Sglang(ExternalEngine):
    name = "sglang"
    version = ("/server_info", "version")
    context_option = "context-length"
    sequences = ("max-running-requests", 128)

    @classmethod
    def command(cls, launch: Launch) -> list[str]:
        arguments = cls.with_defaults(launch, launch.context)
        if len(launch.devices) > 1:
            arguments["tp-size"] = str(len(launch.devices))
        if "cpu" in launch.devices:
            arguments["device"] = "cpu"
        if launch.embeds:
            arguments["is-embedding"] = "true"
        adapters: list[str] = []
        if launch.adapters:
            arguments.setdefault("max-loras-per-batch", str(len(launch.adapters) + 1))  # requests without one count
            places = [f"{name}={place}" for name, place in launch.adapters.items()]
            adapters = ["--enable-lora", "--lora-paths", *places]
        return [
            f"--model-path={launch.model}",
            f"--served-model-name={launch.name}",
            *cls.listen(launch.address),
            "--load-format=safetensors",
            "--skip-tokenizer-init",
            "--sampling-defaults=openai",
            "--grammar-backend=llguidance",
            "--enable-metrics",
            *options(arguments),
            *adapters,
        ]

    def request(self, piece: Piece) -> tuple[str, dict[str, Any]]:
        sampling = piece.sampling
        if piece.embeds:
            return "/v1/embeddings", {"model": self.model, "input": piece.tokens}
        parameters: dict[str, Any] = {
            "max_new_tokens": piece.most,
            "min_new_tokens": piece.least,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "sampling_seed": piece.seed >> 31,  # 32 bits
            "stop_token_ids": sampling.stop_ids,
            "ignore_eos": True,
            "skip_special_tokens": False,
            "no_stop_trim": True,
        }
        if piece.counts:
            parameters["presence_penalty"] = sampling.presence_penalty
            parameters["frequency_penalty"] = sampling.frequency_penalty
        if piece.bias:
            parameters["logit_bias"] = {str(token): value for token, value in piece.bias.items()}
        if (grammar := sampling.grammar) is not None:
            match grammar.kind:
                case "json_schema":
                    parameters["json_schema"] = grammar.text
                case "json_object":
                    parameters["json_schema"] = '{"type": "object"}'
                case "choice":
                    parameters["regex"] = "|".join(_escaped(text) for text in json.loads(grammar.text))
                case _:
                    parameters["regex"] = grammar.text
        body: dict[str, Any] = {"input_ids": piece.tokens, "sampling_params": parameters, "stream": True}
        if sampling.adapter:
            body["lora_path"] = sampling.adapter
        if sampling.logprobs is not None:
            body["return_logprob"] = True
            body["top_logprobs_num"] = sampling.logprobs
        return "/generate", body

    def part(self, answer: dict[str, Any], have: int, piece: Piece) -> Part:
        if piece.embeds:
            return Part([], vector=answer["data"][0]["embedding"], end="stop")
        about: dict[str, Any] = answer.get("meta_info") or {}
        tokens = [int(token) for token in answer.get("output_ids") or ()]
        count = int(about.get("completion_tokens", have + len(tokens)))
        # The count tells a cumulative stream from one of deltas, and bounds both: the last event may repeat a token.
        fresh = slice(have, count) if len(tokens) >= count else slice(0, max(0, count - have))
        logprobs: list[TokenLogprobs] = []
        if piece.sampling.logprobs is not None:
            logprobs = _logprobs(about, fresh)
        cached = int(about.get("cached_tokens") or 0)
        reason = about.get("finish_reason")
        if reason is None:
            return Part(tokens[fresh], logprobs, cached=cached)
        kind = str(reason.get("type", "stop")) if isinstance(reason, dict) else str(reason)
        if kind == "abort":
            return Part(tokens[fresh], logprobs, "abort", str(reason.get("message") or ""))
        return Part(tokens[fresh], logprobs, kind, cached=cached)

    def stats(self, samples: Mapping[str, float]) -> EngineStats:
        return EngineStats(
            kv_usage=samples.get("sglang:token_usage"),
            running=whole(samples, "sglang:num_running_reqs"),
            waiting=whole(samples, "sglang:num_queue_reqs"),
        )


def _logprobs(about: dict[str, Any], fresh: slice) -> list[TokenLogprobs]:
    """Of the fresh tokens: rows of [log probability, token, text], which are as cumulative as the tokens."""
    sampled = (about.get("output_token_logprobs") or [])[fresh]
    tops = (about.get("output_top_logprobs") or [])[fresh]
    rows: list[TokenLogprobs] = []
    for place, (value, *_) in enumerate(sampled):
        top = (tops[place] if place < len(tops) else None) or ()
        rows.append(TokenLogprobs(float(value), [(int(token), float(logprob)) for logprob, token, *_ in top]))
    return rows


def _escaped(text: str) -> str:
    return "".join(f"\\{character}" if character in r".^$*+?{}[]\|()" else character for character in text)
