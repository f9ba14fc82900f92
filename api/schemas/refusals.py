"""Refusals by name, and fields of a body that are known and not served yet."""

from __future__ import annotations

from api.schemas.generation import GenerationFields
from control.errors import RequestError


def refuse_unserved(request: GenerationFields) -> None:
    """Raise RequestError for a field of the body that is not served."""
    if getattr(request, "suffix", None):
        raise refusal("suffix")


def missing(name: str) -> RequestError:
    return RequestError(f"Missing required parameter: '{name}'.", param=name, code="missing_required_parameter")


def refusal(name: str, remedy: str = "Remove it from the request.") -> RequestError:
    return RequestError(
        f"'{name}' is not supported by this server. {remedy}",
        param=name,
        code="unsupported_parameter",
    )
