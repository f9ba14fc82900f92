"""Usage of a key is counted once for each request: whichever way it ends."""

from __future__ import annotations

from datetime import date

from control import requests
from control.access import days, usage_of_day, usage_of_key
from control.messages import LogEntry
from control.requests import Emission
from tests.contract.conftest import MODEL, Farm, last, token

[TODAY] = days(1)


def counts(farm: Farm, account: str = "k") -> tuple[int, int, int, int] | None:
    usage = farm.run(usage_of_key(MODEL, account, TODAY))
    if usage is None:
        return None
    return usage.requests, usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens


def test_an_answer_is_counted_once(farm: Farm) -> None:
    """With its last token, prompt and cached tokens included; the same emission again changes nothing."""
    farm.put("a", prompt=7, account="k")
    lease = farm.lead()
    farm.claim(lease)
    farm.emit(lease, Emission("a", 1, [token(1)], times={"cached_tokens": 4}))
    assert counts(farm) is None
    final = Emission("a", 2, [token(2), last(3)], "finished")
    farm.emit(lease, final)
    farm.emit(lease, final)
    assert counts(farm) == (1, 7, 4, 3)
    farm.put("b", prompt=2, account="k")
    farm.claim(lease)
    farm.emit(lease, Emission("b", 1, [last(1)], "finished"))
    assert counts(farm) == (2, 9, 4, 4)


def test_what_never_ran_costs_no_tokens(farm: Farm) -> None:
    """A request that is cancelled while it waits is a request without tokens."""
    farm.put("a", prompt=7, account="k")
    farm.run(requests.cancel(MODEL, "a", "t"))
    farm.run(requests.cancel(MODEL, "a", "t"))
    assert counts(farm) == (1, 0, 0, 0)


def test_without_an_account_nothing_is_counted(farm: Farm) -> None:
    """And each account has its own counts."""
    lease = farm.lead()
    for rid, account in (("a", ""), ("b", "k"), ("c", "other")):
        farm.put(rid, account=account)
        farm.claim(lease)
        farm.emit(lease, Emission(rid, 1, [last(1)], "finished"))
    usage = farm.run(usage_of_day(MODEL, TODAY))
    assert [(one.key, one.requests, one.completion_tokens) for one in usage] == [("k", 1, 1), ("other", 1, 1)]
    assert farm.client.pttl(farm.keys.usage((TODAY - date(1970, 1, 1)).days)) > 0


def test_a_request_that_comes_back_keeps_its_account(farm: Farm) -> None:
    """After a loss of data it is enqueued again, and counted under the same key at its end."""
    farm.put("a", prompt=3, account="k", delivered=[token(1)], lost=True)
    lease = farm.lead()
    farm.claim(lease)
    farm.emit(lease, Emission("a", 2, [last(2)], "finished"))
    assert counts(farm) == (1, 3, 0, 2)


def test_a_prompt_alone_is_counted_where_that_was_asked_for(farm: Farm) -> None:
    """A request for its prompt's scores ends without a token, and was served."""
    farm.put("a", prompt=7, account="k")
    lease = farm.lead()
    farm.claim(lease)
    farm.emit(lease, Emission("a", 1, [LogEntry(1, 0, None, "length", "max_tokens")], "finished"))
    assert counts(farm) == (1, 7, 0, 0)
