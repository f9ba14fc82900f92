"""Errors under the names that the client used, where a request was turned into another form."""

from __future__ import annotations

import re
from collections.abc import Generator
from contextlib import contextmanager

from control.errors import RequestError

Names = dict[str, str]
"""The client's names of a chat request's parameters, whole or as patterns, which begin with ^."""


@contextmanager
def naming(names: Names) -> Generator[None]:
    """A RequestError of the block gets its parameter under the name that the client used."""
    try:
        yield
    except RequestError as error:
        param = error.param or ""
        error.param = _client_name(param, names) or error.param
        if error.param != param:
            error.args = (str(error).replace(f"'{param}'", f"'{error.param}'"),)
        raise


def _client_name(param: str, names: Names) -> str:
    if param in names:
        return names[param]
    ours = next((ours for ours in names if ours.startswith("^") and re.match(ours, param)), None)
    return param if ours is None else re.sub(ours, names[ours], param)
