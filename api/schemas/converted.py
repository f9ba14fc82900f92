"""A conversation that came in another API's form: a chat request, and facts for the answer's own form."""

from __future__ import annotations

from typing import Any

from api.schemas.chat import ChatRequest, check_chat
from api.schemas.context_edits import Edit
from api.schemas.decoding import Names, convert_part, naming
from api.schemas.view import Endpoint
from control.messages import Sampling


class Converted(ChatRequest, kw_only=True, forbid_unknown_fields=True):
    """The chat request of a body of another API, such as /v1/messages or /api/chat; no client sends it."""

    endpoint: Endpoint
    extra_fields: dict[str, Any]
    names: Names = {}
    edits: list[Edit] | None = None
    """Edits of the conversation that the client asks for; None where it says nothing of them."""

    def shown_fields(self, sampling: Sampling) -> dict[str, Any]:
        """`extra_fields`, with the defaults that the model has filled in."""
        if self.endpoint == "messages":
            return {**self.extra_fields, "cut": sampling.max_tokens < (self.token_limit or 0)}
        if self.endpoint != "responses":
            return self.extra_fields
        names = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
        return {**self.extra_fields, **{name: getattr(sampling, name) for name in names}}


def converse(chat: dict[str, Any], endpoint: Endpoint, extra_fields: dict[str, Any], names: Names) -> Converted:
    """Check a body that was turned into chat's form. Raises RequestError in the client's own names."""
    fields = {name: value for name, value in chat.items() if value is not None}
    with naming(names):
        request = convert_part(
            fields | {"endpoint": endpoint, "extra_fields": extra_fields, "names": names}, Converted, ""
        )
        check_chat(request)
    return request
