"""Refusals by name."""

from __future__ import annotations

from control.errors import RequestError


def missing(name: str) -> RequestError:
    return RequestError(f"Missing required parameter: '{name}'.", param=name, code="missing_required_parameter")


def refusal(name: str, remedy: str = "Remove it from the request.") -> RequestError:
    return RequestError(
        f"'{name}' is not supported by this server. {remedy}",
        param=name,
        code="unsupported_parameter",
    )
