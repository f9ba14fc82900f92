"""Only the lock's holder emits a step's tokens: its effects, and which leaders may emit."""

from __future__ import annotations

import pytest

from control import requests, scripts
from control.constants import RETENTION_MS
from control.errors import Fenced, Lost, Poisoned
from control.messages import EventRow, decode_event
from control.replicas.health import write_poison
from control.replicas.lease import Lease
from control.requests import Emission
from tests.contract.conftest import MODEL, Farm, last, token


def events(farm: Farm, api: str, emissions: list[tuple[Emission, ...]], lease: object) -> list[list[EventRow]]:
    """Messages that `api` receives while the leader emits."""
    with farm.client.pubsub(ignore_subscribe_messages=True) as pubsub:
        pubsub.subscribe(farm.keys.events(api))
        assert pubsub.get_message(timeout=20) is None  # the confirmation, so that nothing below is missed
        for rows in emissions:
            farm.emit(lease, *rows)  # type: ignore[arg-type]
        farm.client.publish(farm.keys.events(api), "[]")
        heard: list[list[EventRow]] = []
        while True:
            message = pubsub.get_message(timeout=20)
            assert message is not None
            if message["data"] == "[]":
                return heard
            heard.append(decode_event(message["data"]))


def test_tokens_reach_log_and_hash(farm: Farm) -> None:
    """The log holds the entries under their seq, the hash counts and stamps them."""
    lease = farm.lead()
    farm.put("a")
    farm.claim(lease)
    result = farm.emit(lease, Emission("a", 1, [token(1, 40), token(2, 41)], times={"t_prefill": 123}))
    assert (result.behind, result.cancelled, result.expired, result.taken) == ({}, [], [], [])
    assert [entry_id for entry_id, _ in farm.client.xrange(farm.keys.log("a"))] == ["1-0", "2-0"]
    followed = farm.look("a", have=1)
    assert [entry.token for entry in followed.entries] == [41]
    fields = followed.fields
    assert (fields["seq"], fields["tokenless"], fields["t_prefill"]) == ("2", "0", "123")
    assert fields["t_first"] == str(result.accepted_ms) and "t_last" not in fields
    assert farm.client.ttl(farm.keys.log("a")) > 0


def test_each_following_api_hears_a_step_once(farm: Farm) -> None:
    """One message per step and api, with the rows of the requests that it follows."""
    lease = farm.lead()
    farm.put("a", api="api1")
    farm.put("b", api="api1")
    farm.put("c", api="api2")
    farm.claim(lease)
    step = tuple(Emission(rid, 1, [token(1)]) for rid in ("a", "b", "c"))
    assert events(farm, "api1", [step], lease) == [[EventRow("a", [token(1)]), EventRow("b", [token(1)])]]


def test_the_end_takes_the_request_out_of_the_queue(farm: Farm) -> None:
    """At the end the prompt is dropped, the tenant's turn is over, and only the retention is left to live."""
    lease = farm.lead()
    farm.put("a", idempotency_key="k", body_hash="h")
    farm.claim(lease)
    farm.emit(lease, Emission("a", 1, [last(1)], "finished"))
    fields = farm.look("a").fields
    assert fields["state"] == "finished"
    assert farm.field("a", "params") is None
    names = (farm.keys.queue("normal", "t"), farm.keys.turns("normal"), farm.keys.served("normal"))
    assert farm.client.exists(*names) == 0
    for key in (farm.keys.request("a"), farm.keys.log("a"), farm.keys.idempotency("t", "k")):
        assert 0 < farm.client.pttl(key) <= RETENTION_MS
    assert farm.load("ended") == 1


def test_the_same_emission_again_changes_nothing(farm: Farm) -> None:
    """A step whose answer was lost is not logged or told twice, and is no mismatch."""
    lease = farm.lead()
    farm.put("a", api="api1")
    farm.put("b", api="api1")
    farm.claim(lease)
    step = (Emission("a", 1, [token(1)]), Emission("b", 1, [last(1)], "finished"))
    assert len(events(farm, "api1", [step, step], lease)) == 1
    assert farm.emit(lease, *step).behind == {}
    assert [farm.completion_tokens(rid) for rid in ("a", "b")] == [1, 1]
    assert farm.load("ended") == 1


@pytest.mark.parametrize("seq", [2, 3, 5])
def test_a_gap_is_refused_with_the_seq_that_is_expected(farm: Farm, seq: int) -> None:
    """A row that does not follow the log is not taken, and the others of the step are."""
    lease = farm.lead()
    farm.put("a")
    farm.put("b")
    farm.claim(lease)
    result = farm.emit(lease, Emission("a", seq, [token(seq)]), Emission("b", 1, [token(1)]))
    assert result.behind == {"a": 1}
    assert farm.look("a").entries == []
    assert farm.look("b").entries == [token(1)]


def test_an_older_seq_with_more_is_refused(farm: Farm) -> None:
    """A row that begins before the end of the log and goes past it is a mismatch, not a repeat."""
    lease = farm.lead()
    farm.put("a")
    farm.claim(lease)
    farm.emit(lease, Emission("a", 1, [token(1)]))
    assert farm.emit(lease, Emission("a", 1, [token(1), token(2)])).behind == {"a": 2}


def test_a_row_without_entries_only_asks(farm: Farm) -> None:
    """Cancels and deadlines reach a leader that has nothing to say."""
    lease = farm.lead()
    farm.put("a")
    farm.put("b")
    farm.put("c")
    farm.claim(lease)
    farm.run(requests.cancel(MODEL, "a", "t"))
    farm.client.hset(farm.keys.request("b"), "deadline", 1)
    result = farm.emit(lease, *(Emission(rid, 1) for rid in ("a", "b", "c", "gone")))
    assert (result.cancelled, result.expired, result.taken) == (["a"], ["b"], ["gone"])
    assert farm.look("a").fields["state"] == "running"


def test_what_another_leader_owns_is_taken(farm: Farm) -> None:
    """A request that went to another replica is not this leader's to write."""
    one, two = farm.lead("r0"), farm.lead("r1", owner="two")
    farm.put("a")
    farm.claim(one)
    farm.run(requests.requeue(one, "a"))
    farm.claim(two)
    assert farm.emit(one, Emission("a", 1, [token(1)])).taken == ["a"]
    assert farm.look("a").entries == []


def test_a_stale_leader_emits_nothing(farm: Farm) -> None:
    """Once the lock has lapsed, and once another holds it, not one row is taken."""
    old = farm.lead()
    farm.put("a")
    farm.claim(old)
    farm.lose(old)
    with pytest.raises(Lost):
        farm.emit(old, Emission("a", 1, [token(1)]))
    farm.lead(owner="two")
    with pytest.raises(Fenced):
        farm.emit(old, Emission("a", 1, [token(1)]))
    assert farm.look("a").entries == []


def test_without_the_fence_a_stale_leader_would_be_heard(farm: Farm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: with the fence cut out of the script the stale emit is accepted, so the fence is what refuses it."""
    old = farm.lead()
    farm.put("a")
    farm.claim(old)
    farm.lose(old)
    farm.lead(owner="two")
    text = scripts.source("emit").replace("local refused = fence(token) or poisoned(token)", "local refused = nil")
    assert text != scripts.source("emit")
    monkeypatch.setitem(scripts.SCRIPTS, "emit", scripts.compose(text))
    farm.emit(old, Emission("a", 1, [token(1, 666)]))
    assert [entry.token for entry in farm.look("a").entries] == [666]


def test_without_the_seq_check_a_repeat_would_be_told_twice(farm: Farm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: with the seq check cut out a repeated step is logged again."""
    lease = farm.lead()
    farm.put("a")
    farm.claim(lease)
    check = "elseif f[3] + 1 ~= seq or f[2] ~= 'running' then"
    text = scripts.source("emit").replace(check, "elseif f[2] ~= 'running' then")
    text = text.replace("local last = seq - 1", "local last = tonumber(f[3])")
    assert check not in text
    monkeypatch.setitem(scripts.SCRIPTS, "emit", scripts.compose(text))
    for _ in range(2):
        farm.emit(lease, Emission("a", 1, [token(1)]))
    assert len(farm.look("a").entries) == 2


def test_a_poisoned_epoch_emits_nothing(farm: Farm) -> None:
    """After the poison no token of that epoch is believed; the next epoch is clean."""
    lease = farm.lead()
    farm.put("a")
    farm.claim(lease)
    write_poison(farm.client, MODEL, "r0", lease.epoch, 1, "desync", "checksums differ")
    with pytest.raises(Poisoned) as poisoned:
        farm.emit(lease, Emission("a", 1, [token(1)]))
    assert (poisoned.value.kind, poisoned.value.rank) == ("desync", 1)
    farm.lose(lease)
    new = farm.lead(owner="two")
    farm.claim(new, adopt=True)
    assert farm.emit(new, Emission("a", 1, [token(1)])).behind == {}


def test_choices_share_one_count(farm: Farm) -> None:
    """With n > 1 the seq runs over all choices, and only tokens are counted as such."""
    lease = farm.lead()
    farm.put("a", n=2)
    farm.claim(lease)
    farm.emit(lease, Emission("a", 1, [token(1, 40, 0), token(2, 50, 1)]))
    farm.emit(lease, Emission("a", 3, [last(3, 41, 0)]))
    assert [(entry.seq, entry.choice) for entry in farm.look("a").entries] == [(1, 0), (2, 1), (3, 0)]
    assert farm.completion_tokens("a") == 3


def test_what_is_too_much_for_one_call_is_emitted_in_several(farm: Farm) -> None:
    """Each call has CALL_COST at most, no row twice; their results make one. Sent again they change nothing."""
    rids = [f"a{index}" for index in range(90)]
    for rid in rids:
        farm.put(rid)
    lease = farm.lead()
    farm.claim(lease)
    farm.run(requests.cancel(MODEL, "a0", "t"))
    farm.run(requests.cancel(MODEL, "a89", "t"))
    rows = [Emission(rid, 1, [token(1)]) for rid in rids[:-1]] + [Emission("a89", 2, [token(2)])]
    calls = requests.emit_all(lease, rows)
    assert len(calls) == 2
    result = requests.merged([farm.run(call) for call in calls])
    assert result.cancelled == ["a0"] and result.behind == {"a89": 1}
    assert requests.merged([farm.run(call) for call in calls]).behind == {"a89": 1}
    assert [farm.field(rid, "seq") for rid in rids] == ["1"] * 89 + ["0"]
    assert len(requests.emit_all(lease, [])) == 1


def test_ends_and_long_rows_make_calls_shorter() -> None:
    """A row of many entries stands alone; rows that end cost more than rows that go on."""
    lease = Lease(MODEL, "r0", "one", 1)
    long = [Emission(f"a{index}", 1, [token(seq) for seq in range(1, 257)]) for index in range(4)]
    assert len(requests.emit_all(lease, long)) == 4
    ends = [Emission(f"a{index}", 1, [last(1)], "finished") for index in range(80)]
    assert len(requests.emit_all(lease, ends)) == 9
