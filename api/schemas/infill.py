"""The body of POST /infill, llama.cpp's endpoint for gaps in code, and the completion that it stands for."""

from __future__ import annotations

from typing import Any

import msgspec

from api.schemas.completions import check_completion
from api.schemas.decoding import Names, Warnings, convert_part, decode_request, naming
from api.schemas.generation import MAX_PARTS, UNLIMITED, CommonFields
from api.schemas.llama_cpp import UNTIL_FULL, WITHOUT_EFFECT, LlamaCppCompletion, warn_without_effect
from control.errors import RequestError

_WITHOUT_EFFECT = {**WITHOUT_EFFECT, "n_probs": "log probabilities are part of /v1/completions and /completion"}
"""Fields that llama.vim and llama.vscode send with each request."""
_NAMES = {r"^prompt$": "input_prefix", r"^suffix$": "input_suffix"}


class ContextFile(msgspec.Struct, kw_only=True):
    """A file, or a part of one, that may help to fill the gap."""

    text: str
    filename: str = "tmp"


class InfillRequest(CommonFields, kw_only=True, forbid_unknown_fields=True):
    input_prefix: str
    """The text before the gap."""
    input_suffix: str
    """The text after the gap."""
    input_extra: list[ContextFile] | None = None
    prompt: str | None = None
    """More text before the gap: the line's beginning in llama.vim."""
    max_tokens: int | None = None
    grammar: str | None = None
    json_schema: Any = None
    # Hints without an effect on the answer.
    response_fields: list[str] | None = None
    t_max_prompt_ms: float | None = None
    # Accepted with a warning.
    n_indent: int | None = None
    t_max_predict_ms: float | None = None
    n_probs: int | None = None


class Filling(LlamaCppCompletion, kw_only=True, forbid_unknown_fields=True):
    """The completion of a body of /infill."""

    input_extra: list[ContextFile] = []

    @property
    def has_gap(self) -> bool:
        return True

    @property
    def files(self) -> list[tuple[str, str]]:
        return [(file.filename, file.text) for file in self.input_extra]

    @property
    def names(self) -> Names:
        return _NAMES


_PASSED_ON = (*CommonFields.__struct_fields__, "grammar", "json_schema")


def parse_infill(body: bytes, warnings: Warnings | None = None) -> Filling:
    """Decode and check a body; raise RequestError naming the field at fault."""
    request = decode_request(body, InfillRequest, warnings)
    warn_without_effect(request, _WITHOUT_EFFECT, warnings)
    files = request.input_extra or []
    if len(files) > MAX_PARTS:
        text = f"'input_extra' has {len(files)} files; at most {MAX_PARTS} are served."
        raise RequestError(text, param="input_extra")
    fields: dict[str, Any] = {name: getattr(request, name) for name in _PASSED_ON}
    fields |= {
        "prompt": request.input_prefix + (request.prompt or ""),
        "suffix": request.input_suffix,
        "max_tokens": UNLIMITED if request.max_tokens == UNTIL_FULL else request.max_tokens,
    }
    completion = {name: value for name, value in fields.items() if value is not None}
    with naming(_NAMES):
        filling = convert_part(completion | {"input_extra": files}, Filling, "")
        check_completion(filling)
    return filling
