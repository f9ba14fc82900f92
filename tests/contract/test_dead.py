"""Dead letters are read, tried again and dropped."""

from __future__ import annotations

import pytest

from control import requests
from control.errors import LetterNotFound, QueueFull
from control.requests import DeadLetter, Emission
from tests.contract.conftest import MODEL, Farm, rids, token


def bury(farm: Farm, rid: str, **fields: str) -> DeadLetter:
    """A request that had one token when it was given up."""
    lease = farm.lead()
    farm.put(rid, **fields)
    farm.claim(lease)
    farm.emit(lease, Emission(rid, 1, [token(1)]))
    assert farm.run(requests.bury(lease, rid, "crashed alone"))
    farm.lose(lease)
    return requests.dead_letter(farm.client, MODEL, rid)


def test_letters_are_listed_newest_first(farm: Farm) -> None:
    """Each with what there is to know; one that is not there is refused with the way to those that are."""
    bury(farm, "a")
    letter = bury(farm, "b", tenant="acme", priority="high", view='{"v":1}')
    assert farm.run(requests.dead_letters(MODEL))[0] == letter
    assert [one.rid for one in farm.run(requests.dead_letters(MODEL))] == ["b", "a"]
    assert (letter.tenant, letter.priority, letter.view, letter.cause) == ("acme", "high", '{"v":1}', "crashed alone")
    assert (letter.attempts, letter.prompt_tokens, letter.seq, letter.replica) == (1, 3, 1, "r0")
    assert letter.params.prompt == [0, 1, 2]
    with pytest.raises(LetterNotFound, match="furrow dead list m"):
        requests.dead_letter(farm.client, MODEL, "nothing")


def test_a_retry_is_a_new_request_with_the_same_words(farm: Farm) -> None:
    """Same prompt, seed, tenant and class, from the first token on; nobody needs to follow it."""
    letter = bury(farm, "a", tenant="acme", priority="high")
    assert requests.retry_letter(farm.client, MODEL, letter, "again") == "again"
    assert farm.run(requests.dead_letters(MODEL)) == []
    [claimed] = farm.claim(farm.lead()).requests
    assert (claimed.rid, farm.params(claimed.rid), farm.log(claimed.rid)) == ("again", letter.params, [])
    assert (claimed.tenant, claimed.priority) == ("acme", "high")
    assert farm.field("again", "on_disconnect") == "continue"
    assert farm.field("a", "state") == "dead"


def test_a_retry_whose_outcome_was_lost_runs_once(farm: Farm) -> None:
    """The second one joins the first, whatever id it brings."""
    letter = bury(farm, "a")
    requests.retry_letter(farm.client, MODEL, letter, "first")
    assert requests.retry_letter(farm.client, MODEL, letter, "second") == "first"
    assert rids(farm.claim(farm.lead())) == ["first"]


def test_a_retry_that_finds_no_room_keeps_the_letter(farm: Farm) -> None:
    """The queue's bound holds for it too."""
    letter = bury(farm, "a")
    farm.client.hset(farm.keys.load, "queued", 10**6)
    with pytest.raises(QueueFull):
        requests.retry_letter(farm.client, MODEL, letter, "again")
    assert [one.rid for one in farm.run(requests.dead_letters(MODEL))] == ["a"]


def test_a_dropped_letter_is_gone(farm: Farm) -> None:
    """Dropping it again changes nothing."""
    letter = bury(farm, "a")
    assert farm.run(requests.drop_letter(MODEL, letter)) is True
    assert farm.run(requests.drop_letter(MODEL, letter)) is False
    assert farm.run(requests.dead_letters(MODEL)) == []
