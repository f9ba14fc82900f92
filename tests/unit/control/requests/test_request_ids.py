"""Ids of requests are unique."""

from __future__ import annotations

from control.requests import member_rid, new_rid


def test_ten_thousand_ids_are_ten_thousand() -> None:
    """However fast they are drawn; nothing in them is a clock."""
    drawn = [new_rid() for _ in range(10_000)]
    assert len(set(drawn)) == 10_000
    assert len({rid[:8] for rid in drawn}) > 9_900


def test_each_prompt_of_a_list_has_an_id_of_its_own() -> None:
    """The first is the answer's; the others follow from it, so that every API process finds them."""
    first, other = new_rid(), new_rid()
    members = [member_rid(first, member) for member in range(100)]
    assert members[0] == first and len(set(members)) == 100
    assert members == [member_rid(first, member) for member in range(100)]
    assert not set(members) & {member_rid(other, member) for member in range(100)}
