"""The fields of a request's hash that every list and page of operators shows, read in one place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

_COUNTS = ("attempts", "prompt_tokens", "seq", "tokenless")
_TEXTS = ("state", "tenant", "account", "priority", "replica", "cancel")
FIELDS = (*_TEXTS, *_COUNTS)


class RequestFacts(msgspec.Struct, frozen=True, kw_only=True):
    """`key` is what the request's usage is counted under; `replica` has it, or had it last."""

    id: str
    model: str
    state: str
    tenant: str
    key: str
    priority: str
    replica: str
    attempts: int
    prompt_tokens: int
    completion_tokens: int
    cancelled: bool
    """It was asked to end, and does so with its next step."""


def named(names: Sequence[str], reply: Sequence[str | None]) -> dict[str, str]:
    """The fields of an HMGET by name, "" for those that are not there."""
    return {name: value or "" for name, value in zip(names, reply, strict=True)}


def facts_of(model: str, rid: str, fields: Mapping[str, str]) -> dict[str, Any]:
    """The arguments of a RequestFacts. `fields` has all of FIELDS."""
    attempts, prompt_tokens, seq, tokenless = (int(fields[name] or 0) for name in _COUNTS)
    return {
        "id": rid,
        "model": model,
        "state": fields["state"],
        "tenant": fields["tenant"],
        "key": fields["account"],
        "priority": fields["priority"],
        "replica": fields["replica"],
        "attempts": attempts,
        "prompt_tokens": prompt_tokens,
        "completion_tokens": seq - tokenless,
        "cancelled": fields["cancel"] == "1",
    }
