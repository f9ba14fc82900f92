"""The table of tolerance: top-level fields of neighbours that no body of ours has, and the treatment of each.

What alters the answer is honoured or refused by name; what does not is accepted. A name in neither a body nor this
table is ignored with a warning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Refused:
    """Would alter the answer and is not implemented: only values that ask for nothing pass. null always does."""

    neutral: tuple[Any, ...] = ()
    remedy: str = "Remove it from the request."

    def passes(self, value: Any) -> bool:
        return value is None or value in self.neutral


_OFF: tuple[Any, ...] = (0, False)
_EMPTY: tuple[Any, ...] = ([], {}, "")
_NO_BEAMS = "Beam search is not implemented; use 'n' for several answers."

TABLE: dict[str, Refused] = {
    # llama.cpp's samplers.
    "mirostat": Refused(_OFF),
    "mirostat_mode": Refused(_OFF),
    "dynatemp_range": Refused(_OFF),
    "dynatemp_low": Refused(_OFF),
    "dynatemp_high": Refused(_OFF),
    "smoothing_factor": Refused(_OFF),
    "dry_multiplier": Refused(_OFF),
    "xtc_probability": Refused(_OFF),
    "top_n_sigma": Refused((-1, 0, 0.0)),
    "tfs_z": Refused((1, 0)),
    "tfs": Refused((1, 0)),
    "top_a": Refused(_OFF),
    "epsilon_cutoff": Refused(_OFF),
    "eta_cutoff": Refused(_OFF),
    "penalty_alpha": Refused(_OFF),
    "guidance_scale": Refused((1, 0)),
    "cfg_scale": Refused((1, 0)),
    "negative_prompt": Refused(_EMPTY),
    "samplers": Refused(_EMPTY, "The order of the samplers is fixed. Remove it from the request."),
    # vLLM's and SGLang's.
    "use_beam_search": Refused(_OFF, _NO_BEAMS),
    "num_beams": Refused((1,), _NO_BEAMS),
    "beam_width": Refused((1,), _NO_BEAMS),
    "length_penalty": Refused((1, 0)),
    "diversity_penalty": Refused(_OFF),
    "no_repeat_ngram_size": Refused(_OFF),
    "logits_processors": Refused(_EMPTY),
    "custom_logit_processor": Refused(_EMPTY),
    "allowed_token_ids": Refused(_EMPTY, "Use 'logit_bias' or a grammar."),
    "best_of": Refused((1,), "Use 'n' for several answers."),
    "lora_path": Refused(_EMPTY),
    "prompt_embeds": Refused(_EMPTY),
    "input_embeds": Refused(_EMPTY),
}
