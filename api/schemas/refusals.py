"""Parameters of OpenAI or other engines that are not served: refused by name, never ignored.

A neutral value (null, an empty list, `"none"`, OpenAI's default) passes, because SDKs send such values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from api.schemas.generation import GenerationFields
from control.errors import RequestError


def _empty(value: Any) -> bool:
    return value is None or value in ([], {}, "")


def _one_of(*neutral: Any) -> Callable[[Any], bool]:
    return lambda value: value is None or value in neutral


_NEUTRAL: dict[str, Callable[[Any], bool]] = {
    "modalities": _one_of(["text"]),
    "audio": _empty,
    "prediction": _empty,
    "moderation": _empty,
    "verbosity": _one_of("medium"),
    "web_search_options": _one_of(),  # {} asks for a search, too
    "service_tier": _one_of("auto", "default"),
    "store": _one_of(False),
    "suffix": _empty,
}


def refuse_unserved(request: GenerationFields) -> None:
    """Raise RequestError with `param` for the first field whose value asks for something that is not served."""
    for name, neutral in _NEUTRAL.items():
        value = getattr(request, name, None)
        if not neutral(value):
            raise refusal(name, "Remove it from the request.")
    options = request.stream_options
    if options is not None:
        for name in ("include_obfuscation", "continuous_usage_stats"):
            if getattr(options, name):
                raise refusal(f"stream_options.{name}")


def missing(name: str) -> RequestError:
    return RequestError(f"Missing required parameter: '{name}'.", param=name, code="missing_required_parameter")


def refusal(name: str, remedy: str = "Remove it from the request.") -> RequestError:
    return RequestError(
        f"'{name}' is not supported by this server. {remedy}",
        param=name,
        code="unsupported_parameter",
    )
