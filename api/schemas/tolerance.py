"""The table of tolerance: how a request's top-level fields are treated that its endpoint does not implement.

What alters the answer is honoured or refused by name; what does not is accepted. A name that neither a body nor this
table has is ignored with a warning. docs/api.md shows the same rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Hint:
    """Accepted without an effect: it can't alter the answer."""


@dataclass(frozen=True, slots=True)
class Mapped:
    """Another name of the first of these fields that the endpoint has."""

    to: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Warned:
    """Ignored with a warning of its own, unless the value is neutral."""

    text: str
    neutral: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Refused:
    """Would alter the answer and is not implemented: refused, unless the value is neutral."""

    neutral: tuple[Any, ...] = ()
    remedy: str = "Remove it from the request."


Row = Hint | Mapped | Warned | Refused

_OFF: tuple[Any, ...] = (0, False)
_ONE: tuple[Any, ...] = (1, 0)
_EMPTY: tuple[Any, ...] = ([], {}, "", False)
_BEAMS = "Beam search is not implemented; use 'n' for several answers."
_FORMAT = "Use 'text.format' of /v1/responses or 'output_config.format' of /v1/messages."
_LIMITS = ("max_tokens", "max_output_tokens")

TABLE: dict[str, Row] = {
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
    "repeat_penalty": Mapped(("repetition_penalty",)),
    "typical": Mapped(("typical_p",)),
    **dict.fromkeys(
        ("thinking_budget", "thinking_budget_tokens", "reasoning_budget_tokens"), Mapped(("thinking_token_budget",))
    ),
    "n_predict": Mapped(_LIMITS),
    "max_new_tokens": Mapped(_LIMITS),
    "max_tokens": Mapped(("max_output_tokens",)),
    "max_completion_tokens": Mapped(_LIMITS),
    "max_output_tokens": Mapped(("max_tokens",)),
    "n_cmpl": Mapped(("n",)),
    "stop_sequences": Mapped(("stop",)),
    "stop": Mapped(("stop_sequences",)),
    "regex": Mapped(("guided_regex",)),
    "ebnf": Mapped(("guided_grammar",)),
    "no_stop_trim": Mapped(("include_stop_str_in_output",)),
    # Ignored, and the client should know.
    "store": Warned(
        "'store' has no effect here: /v1/responses and /v1/chat/completions store their answers.", (False,)
    ),
    "samplers": Warned("'samplers' has no effect: the order of the samplers is fixed.", _EMPTY),  # of llama.vim
    "num_ctx": Warned("'num_ctx' has no effect: a model has the context with which it was loaded."),
    "repeat_last_n": Warned("'repeat_last_n' has no effect: penalties count the whole context.", (-1,)),
    "penalize_newline": Warned("'penalize_newline' has no effect: penalties count line breaks too.", (True,)),
    # llama.cpp's and others' samplers.
    "mirostat": Refused(_OFF),
    "mirostat_mode": Refused(_OFF),
    "smoothing_factor": Refused(_OFF),
    "tfs_z": Refused(_ONE),
    "tfs": Refused(_ONE),
    "top_a": Refused(_OFF),
    "epsilon_cutoff": Refused(_OFF),
    "eta_cutoff": Refused(_OFF),
    "penalty_alpha": Refused(_OFF),
    "guidance_scale": Refused(_ONE),
    "cfg_scale": Refused(_ONE),
    "negative_prompt": Refused(_EMPTY),
    "min_keep": Refused(_OFF),
    "n_indent": Refused(_OFF),
    "n_probs": Refused(_OFF, "Use 'logprobs'."),
    "t_max_predict_ms": Refused(_OFF, "Use 'timeout', in seconds."),
    "response_fields": Refused(_EMPTY),
    "lora": Refused(_EMPTY),
    # vLLM's and SGLang's.
    "use_beam_search": Refused(_OFF, _BEAMS),
    "num_beams": Refused(_ONE, _BEAMS),
    "beam_width": Refused(_ONE, _BEAMS),
    "best_of": Refused(_ONE, "Use 'n' for several answers."),
    "length_penalty": Refused(_ONE),
    "diversity_penalty": Refused(_OFF),
    "no_repeat_ngram_size": Refused(_OFF),
    "logits_processors": Refused(_EMPTY),
    "custom_logit_processor": Refused(_EMPTY),
    "allowed_token_ids": Refused(_EMPTY, "Use /v1/chat/completions or /v1/completions."),
    "logprob_token_ids": Refused(_EMPTY, "Use 'logprobs' and 'top_logprobs'."),
    "truncate_prompt_tokens": Refused((-1,), "Send a shorter prompt."),
    "repetition_detection": Refused(_EMPTY),
    "stop_regex": Refused(_EMPTY, "Use 'stop'."),
    "chat_template": Refused(_EMPTY, "The model's own template is used. Remove it from the request."),
    "documents": Refused(_EMPTY, "Send them as 'chat_template_kwargs.documents' or in a message."),
    "lora_path": Refused(_EMPTY),
    "prompt_embeds": Refused(_EMPTY),
    "input_embeds": Refused(_EMPTY),
    "return_hidden_states": Refused(_OFF),
    "vllm_xargs": Refused(_EMPTY),
    # OpenAI's.
    "modalities": Refused((["text"], [])),
    "audio": Refused(_EMPTY),
    "moderation": Refused(_EMPTY),
    "web_search_options": Refused(),  # {} asks for a search, too
    # Fields of one endpoint that were sent to another one.
    "n": Refused((1,), "Send several requests."),
    "suffix": Refused(_EMPTY, "Use /v1/completions."),
    "logprobs": Refused(_OFF),
    "top_logprobs": Refused(_OFF),
    "presence_penalty": Refused(_OFF),
    "frequency_penalty": Refused(_OFF),
    "response_format": Refused(({"type": "text"}, {}, ""), _FORMAT),
    **dict.fromkeys(
        ("grammar", "guided_choice", "guided_grammar", "guided_json", "guided_regex"), Refused(_EMPTY, _FORMAT)
    ),
    **dict.fromkeys(("json_schema", "structured_outputs"), Refused(_EMPTY, _FORMAT)),
    **dict.fromkeys(
        ("function_call", "functions"), Refused(("none", "auto", [], {}), "Use 'tools' and 'tool_choice'.")
    ),
    "system": Refused(_EMPTY, "Send a message with role 'system'."),
    "instructions": Refused(_EMPTY, "Send a message with role 'system'."),
    "previous_response_id": Refused(_EMPTY, "Use /v1/responses."),
    "conversation": Refused(_EMPTY, "Send all messages each time."),
}
