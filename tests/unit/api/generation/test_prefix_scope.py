"""Prefixes are shared within a scope: whose prompts a request may begin with."""

from __future__ import annotations

import itertools

import pytest

from api.generation.client_request import scoped_salt

OWNERS = ("a", "b", "shared", "tenant", "~keyless")


@pytest.mark.parametrize("sharing", [(), ("a",)])
def test_a_client_reaches_no_other_scope(sharing: tuple[str, ...]) -> None:
    """Whatever salt it names: another scope's, or what another scope begins with."""
    named = ["", "x", *(scoped_salt(owner, (), "") for owner in OWNERS), "shared\n", "\n", "tenant a"]
    pairs = itertools.product(OWNERS, named)
    salts = {pair: scoped_salt(pair[0], sharing, pair[1]) for pair in pairs}
    assert len(set(salts.values())) == len(salts)


def test_those_that_share_have_one_scope() -> None:
    assert scoped_salt("a", ("a", "b"), "x") == scoped_salt("b", ("a", "b"), "x")
    assert scoped_salt("a", ("a", "b"), "x") != scoped_salt("b", ("a", "b"), "y")
    assert scoped_salt("c", ("a", "b"), "") not in (scoped_salt("a", ("a", "b"), ""), scoped_salt("d", ("a", "b"), ""))
    assert scoped_salt("c", ("all",), "") == scoped_salt("~keyless", ("all",), "")
