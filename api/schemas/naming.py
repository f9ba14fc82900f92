"""Errors under the names that the client used, where a request was turned into another form."""

from __future__ import annotations

import re
from collections.abc import Generator
from contextlib import contextmanager

from control.errors import RequestError

Names = dict[str, str]
"""Patterns for a chat request's names of parameters, and what the client calls them."""


@contextmanager
def naming(names: Names) -> Generator[None]:
    """A RequestError of the block gets its parameter under the name that the client used."""
    try:
        yield
    except RequestError as error:
        param = error.param or ""
        ours = next((ours for ours in names if re.match(ours, param)), None)
        if ours is not None:
            error.param = re.sub(ours, names[ours], param)
            error.args = (str(error).replace(f"'{param}'", f"'{error.param}'"),)
        raise
