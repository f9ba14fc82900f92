"""Every error has one status and one body."""

from __future__ import annotations

import math

import pytest
from litestar.exceptions import HTTPException

from api.http.errors import BodyTooSlow, GenerationFailed, TooManyBodies, Unauthorized, problem
from control import errors


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (errors.RequestError("x", param="n"), 400, "invalid_request_error", None),
        (errors.ContextLengthExceeded(1, 2, 3), 400, "invalid_request_error", "context_length_exceeded"),
        (Unauthorized("x"), 401, "authentication_error", "invalid_api_key"),
        (errors.ModelNotFound("x", []), 404, "not_found_error", "model_not_found"),
        (errors.RequestNotFound("x"), 404, "not_found_error", "request_not_found"),
        (errors.IdempotencyConflict("x"), 409, "invalid_request_error", "idempotency_conflict"),
        (errors.RequestTooLarge("x"), 413, "invalid_request_error", "request_too_large"),
        (errors.TemplateFailed("x"), 422, "invalid_request_error", "template_failed"),
        (errors.QueueFull("m", 3, 2.5), 429, "rate_limit_error", "rate_limit_exceeded"),
        (errors.ModelUnavailable("m", "failed", "x"), 503, "server_error", "model_unavailable"),
        (errors.RedisUnavailable("secret host"), 503, "server_error", "unavailable"),
        (GenerationFailed("x", code="deadline_exceeded", status=503), 503, "server_error", "deadline_exceeded"),
        (BodyTooSlow("x"), 408, "invalid_request_error", "request_timeout"),
        (TooManyBodies("x"), 429, "rate_limit_error", "rate_limit_exceeded"),
        (KeyError("secret"), 500, "server_error", "internal_error"),
    ],
)
def test_each_error_has_its_status_type_and_code(error: Exception, status: int, kind: str, code: str | None) -> None:
    """Status, type and code of each kind; those worth a retry say when; no inside is told."""
    http_problem = problem(error)
    assert (http_problem.status, http_problem.body.error.type, http_problem.body.error.code) == (status, kind, code)
    final = code in ("deadline_exceeded", "idempotency_conflict")
    assert ("retry-after" in http_problem.headers) == (status in (429, 503) and not final)
    assert http_problem.headers.get("x-should-retry") == ("false" if final else None)
    assert "secret" not in http_problem.body.error.message


def test_what_the_framework_refuses_names_what_was_asked() -> None:
    """Method and path of the request, and what to do instead."""
    missing = problem(HTTPException(status_code=404), "GET /v2/models").body.error.message
    assert "GET /v2/models" in missing and "/v1/models" in missing
    wrong = HTTPException(status_code=405, headers={"allow": "POST, OPTIONS"})
    assert problem(wrong, "GET /v1/completions").body.error.message == (
        "Method not allowed: GET /v1/completions. Use POST, OPTIONS."
    )


def test_retry_after_in_both_units() -> None:
    """Whole seconds for HTTP, at least one; milliseconds for the SDKs; at most what an SDK obeys."""
    for wait, least, most in ((0.2, 0.2, 0.25), (2.4, 2.4, 3.0), (60.0, 60.0, 60.0)):
        headers = problem(errors.QueueFull("m", 3, wait)).headers
        assert least * 1000 <= int(headers["retry-after-ms"]) <= most * 1000
        assert int(headers["retry-after"]) == max(1, math.ceil(int(headers["retry-after-ms"]) / 1000))


def test_refused_together_is_not_back_together() -> None:
    """Equal refusals name times that are spread over a quarter of the wait."""
    waits = [int(problem(errors.QueueFull("m", 3, 10.0)).headers["retry-after-ms"]) for _ in range(100)]
    assert max(waits) - min(waits) > 1000
