"""Values of a JSON body are counted before decoding: as a decoder would find them, however the body is cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.http.bodies import MOST_VALUES, Structure
from control.errors import RequestError

values = st.recursive(
    st.none() | st.integers() | st.text(alphabet='a"\\,:[]{}é'),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(alphabet='a"\\,:[{'), inner),
)


def weight(value: Any) -> int:
    """Commas, and eight for each colon and opening bracket."""
    if not isinstance(value, (dict, list)):
        return 0
    inner = list(value.values() if isinstance(value, dict) else value)
    members = 8 * len(inner) if isinstance(value, dict) else 0
    return 8 + members + max(0, len(inner) - 1) + sum(weight(one) for one in inner)


@given(values, st.booleans(), st.integers(1, 7))
def test_the_count_is_that_of_the_values(value: Any, ascii_only: bool, size: int) -> None:
    """Whatever stands in texts does not count."""
    body = json.dumps(value, ensure_ascii=ascii_only).encode()
    structure = Structure()
    for start in range(0, len(body), size):
        structure.count(body[start : start + size])
    assert structure.values == weight(value)


@pytest.mark.parametrize("unit", [b"[1],", b'{"a":1},', b"1,", b'"",', b"{},", b'"a":1,'])
def test_too_many_values_are_refused_early(unit: bytes) -> None:
    """Refused after as much as is decoded in some 20 ms."""
    structure, counted = Structure(), 0
    with pytest.raises(RequestError, match="too many values"):
        while True:
            structure.count(unit * 100)
            counted += 100
    assert counted <= MOST_VALUES
