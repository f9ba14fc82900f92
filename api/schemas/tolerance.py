"""The table of tolerance: how a request's top-level fields are treated that its endpoint does not implement.

A field that alters the answer is honoured or refused by name; any other one is accepted. A name that neither a body nor
this table has is ignored with a warning. docs/api.md shows the same rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Hint:
    """Accepted without an effect: it can't alter the answer."""


@dataclass(frozen=True, slots=True)
class Alias:
    """Another name of the first of these fields that the endpoint has."""

    to: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Ignored:
    """Ignored. The client gets a warning of its own, unless the value is neutral."""

    text: str
    neutral: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Unsupported:
    """Would alter the answer and is not implemented: refused, unless the value is neutral."""

    neutral: tuple[Any, ...] = ()
    remedy: str = "Remove it from the request."


Treatment = Hint | Alias | Ignored | Unsupported

_OFF: tuple[Any, ...] = (0, False)
_ONE: tuple[Any, ...] = (1, 0)
_EMPTY: tuple[Any, ...] = ([], {}, "", False)
_BEAMS = "Beam search is not implemented; use 'n' for several answers."
_FORMAT = "Use 'text.format' of /v1/responses or 'output_config.format' of /v1/messages."
_LIMITS = ("max_tokens", "max_output_tokens")

TABLE: dict[str, Treatment] = {
    # OpenAI's, OpenRouter's and others' names of what only their service has.
    "prediction": Hint(),  # of chat completions: elsewhere nothing is predicted
    **dict.fromkeys(("client_metadata", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"), Hint()),
    **dict.fromkeys(("provider", "safety_identifier", "service_tier", "transforms", "usage", "verbosity"), Hint()),
    # vLLM's and SGLang's names of one request, and of its way through their server.
    **dict.fromkeys(("custom_labels", "extra_key", "kv_transfer_params", "request_id", "rid", "session_id"), Hint()),
    **dict.fromkeys(("spaces_between_special_tokens", "stream_interval"), Hint()),
    # llama.cpp's: its slots, its cache and its progress, and numbers that belong to a sampler below.
    **dict.fromkeys(("cache_prompt", "id_slot", "n_cache_reuse", "n_keep", "return_progress"), Hint()),
    **dict.fromkeys(("mirostat_eta", "mirostat_tau"), Hint()),
    # Ollama's options: how its server loads and runs a model.
    **dict.fromkeys(("embedding_only", "f16_kv", "logits_all", "low_vram", "main_gpu", "num_batch", "num_gpu"), Hint()),
    **dict.fromkeys(("num_keep", "num_thread", "numa", "use_mlock", "use_mmap", "vocab_only"), Hint()),
    # Neighbours' names of fields that are served.
    "repeat_penalty": Alias(("repetition_penalty",)),
    "typical": Alias(("typical_p",)),
    **dict.fromkeys(
        ("thinking_budget", "thinking_budget_tokens", "reasoning_budget_tokens"), Alias(("thinking_token_budget",))
    ),
    "n_predict": Alias(_LIMITS),
    "max_new_tokens": Alias(_LIMITS),
    "max_tokens": Alias(("max_output_tokens",)),
    "max_completion_tokens": Alias(_LIMITS),
    "max_output_tokens": Alias(("max_tokens",)),
    "n_cmpl": Alias(("n",)),
    "stop_sequences": Alias(("stop",)),
    "stop": Alias(("stop_sequences",)),
    "regex": Alias(("guided_regex",)),
    "ebnf": Alias(("guided_grammar",)),
    "no_stop_trim": Alias(("include_stop_str_in_output",)),
    # Ignored, and the client should know.
    "store": Ignored(
        "'store' has no effect here: /v1/responses and /v1/chat/completions store their answers.", (False,)
    ),
    "samplers": Ignored("'samplers' has no effect: the order of the samplers is fixed.", _EMPTY),  # of llama.vim
    "num_ctx": Ignored("'num_ctx' has no effect: a model has the context with which it was loaded."),
    "repeat_last_n": Ignored("'repeat_last_n' has no effect: penalties count the whole context.", (-1,)),
    "penalize_newline": Ignored("'penalize_newline' has no effect: penalties count line breaks too.", (True,)),
    # llama.cpp's and others' samplers.
    "mirostat": Unsupported(_OFF),
    "mirostat_mode": Unsupported(_OFF),
    "smoothing_factor": Unsupported(_OFF),
    "tfs_z": Unsupported(_ONE),
    "tfs": Unsupported(_ONE),
    "top_a": Unsupported(_OFF),
    "epsilon_cutoff": Unsupported(_OFF),
    "eta_cutoff": Unsupported(_OFF),
    "penalty_alpha": Unsupported(_OFF),
    "guidance_scale": Unsupported(_ONE),
    "cfg_scale": Unsupported(_ONE),
    "negative_prompt": Unsupported(_EMPTY),
    "min_keep": Unsupported(_OFF),
    "n_indent": Unsupported(_OFF),
    "n_probs": Unsupported(_OFF, "Use 'logprobs'."),
    "t_max_predict_ms": Unsupported(_OFF, "Use 'timeout', in seconds."),
    "response_fields": Unsupported(_EMPTY),
    "lora": Unsupported(_EMPTY),
    # vLLM's and SGLang's.
    "use_beam_search": Unsupported(_OFF, _BEAMS),
    "num_beams": Unsupported(_ONE, _BEAMS),
    "beam_width": Unsupported(_ONE, _BEAMS),
    "best_of": Unsupported(_ONE, "Use 'n' for several answers."),
    "length_penalty": Unsupported(_ONE),
    "diversity_penalty": Unsupported(_OFF),
    "no_repeat_ngram_size": Unsupported(_OFF),
    "logits_processors": Unsupported(_EMPTY),
    "custom_logit_processor": Unsupported(_EMPTY),
    "allowed_token_ids": Unsupported(_EMPTY, "Use /v1/chat/completions or /v1/completions."),
    "logprob_token_ids": Unsupported(_EMPTY, "Use 'logprobs' and 'top_logprobs'."),
    "truncate_prompt_tokens": Unsupported((-1,), "Send a shorter prompt."),
    "repetition_detection": Unsupported(_EMPTY),
    "stop_regex": Unsupported(_EMPTY, "Use 'stop'."),
    "chat_template": Unsupported(_EMPTY, "The model's own template is used. Remove it from the request."),
    "documents": Unsupported(_EMPTY, "Send them as 'chat_template_kwargs.documents' or in a message."),
    "lora_path": Unsupported(_EMPTY),
    "prompt_embeds": Unsupported(_EMPTY),
    "input_embeds": Unsupported(_EMPTY),
    "return_hidden_states": Unsupported(_OFF),
    "vllm_xargs": Unsupported(_EMPTY),
    # OpenAI's.
    "modalities": Unsupported((["text"], [])),
    "audio": Unsupported(_EMPTY),
    "moderation": Unsupported(_EMPTY),
    "web_search_options": Unsupported(),  # {} asks for a search, too
    # Fields of one endpoint that were sent to another one.
    "n": Unsupported((1,), "Send several requests."),
    "suffix": Unsupported(_EMPTY, "Use /v1/completions."),
    "logprobs": Unsupported(_OFF),
    "top_logprobs": Unsupported(_OFF),
    "presence_penalty": Unsupported(_OFF),
    "frequency_penalty": Unsupported(_OFF),
    "response_format": Unsupported(({"type": "text"}, {}, ""), _FORMAT),
    **dict.fromkeys(
        ("grammar", "guided_choice", "guided_grammar", "guided_json", "guided_regex"), Unsupported(_EMPTY, _FORMAT)
    ),
    **dict.fromkeys(("json_schema", "structured_outputs"), Unsupported(_EMPTY, _FORMAT)),
    **dict.fromkeys(
        ("function_call", "functions"), Unsupported(("none", "auto", [], {}), "Use 'tools' and 'tool_choice'.")
    ),
    "system": Unsupported(_EMPTY, "Send a message with role 'system'."),
    "instructions": Unsupported(_EMPTY, "Send a message with role 'system'."),
    "previous_response_id": Unsupported(_EMPTY, "Use /v1/responses."),
    "conversation": Unsupported(_EMPTY, "Send all messages each time."),
}
