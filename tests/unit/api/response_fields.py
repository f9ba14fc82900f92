"""The fields of a request that its response repeats, as a request without options has them."""

from __future__ import annotations

from typing import Any

import msgspec

from api.schemas.responses import conversation, parse_response

ITEMS: list[Any] = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]}]
SAMPLED = {"temperature": 1.0, "top_p": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


def response_fields(**options: Any) -> dict[str, Any]:
    """`View.extra_fields` of a body of /v1/responses with these options."""
    request = parse_response(msgspec.json.encode({"model": "m", "input": "x", **options}))
    return conversation(request, ITEMS, stored=options.get("store", False)).extra_fields | SAMPLED
