"""A conversation that came in another API's form: a chat request, and facts for the answer's own form."""

from __future__ import annotations

import re
from typing import Any

from api.schemas.chat import ChatRequest, check_chat
from api.schemas.decoding import convert_part
from api.schemas.view import Endpoint
from control.errors import RequestError
from control.messages import Sampling

Names = dict[str, str]
"""Patterns for a chat request's names of parameters, and what the client calls them."""


class Converted(ChatRequest, kw_only=True, forbid_unknown_fields=True):
    """The chat request of a body of /v1/responses or /v1/messages; no client sends it."""

    endpoint: Endpoint
    told_back: dict[str, Any]
    names: Names = {}

    @property
    def limit_shrinks(self) -> bool:
        """Anthropic's `max_tokens` is required, so clients send large ones: it may be more than there is room for."""
        return self.endpoint == "messages"

    def told(self, sampling: Sampling) -> dict[str, Any]:
        """`told_back`, with the defaults that the model has filled in."""
        if self.endpoint == "messages":
            return {**self.told_back, "cut": sampling.max_tokens < (self.token_limit or 0)}
        return {**self.told_back, "temperature": sampling.temperature, "top_p": sampling.top_p}


def converse(chat: dict[str, Any], endpoint: Endpoint, told_back: dict[str, Any], names: Names) -> Converted:
    """Check a body that was turned into chat's form. Raises RequestError in the client's own names."""
    given = {name: value for name, value in chat.items() if value is not None}
    with_names = given | {"endpoint": endpoint, "told_back": told_back, "names": names}
    try:
        request = convert_part(with_names, Converted, "")
        check_chat(request)
    except RequestError as error:
        raise renamed(error, names) from None
    return request


def renamed(error: RequestError, names: Names) -> RequestError:
    """The error with its parameter under the name that the client used."""
    param = error.param or ""
    for ours, theirs in names.items():
        if re.match(ours, param):
            error.param = re.sub(ours, theirs, param)
            error.args = (str(error).replace(f"'{param}'", f"'{error.param}'"),)
            break
    return error
