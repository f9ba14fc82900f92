"""One answer has one set of weights; and a replica that is gone for good leaves nothing behind."""

from __future__ import annotations

from control.records import catalog
from control.replicas.lease import Lease
from control.requests import Emission
from tests.contract.conftest import MODEL, Farm, rids, token

OLD, NEW = "11112222", "33334444"


def leads(farm: Farm, replica: str, weights: str, owner: str = "one") -> Lease:
    """A leader that has said what its replica is."""
    farm.run(catalog.put_replica(MODEL, replica, catalog.Assigned(revision=1, tp=1)))
    farm.run(catalog.put_weights(MODEL, replica, weights))
    return farm.lead(replica, owner, weights=weights)


def began(farm: Farm, lease: Lease, *names: str) -> None:
    """The leader has the requests and has emitted a token of each."""
    for rid in names:
        farm.put(rid)
    assert set(names) <= set(rids(farm.claim(lease)))
    farm.emit(lease, *(Emission(rid, 1, [token(1)]) for rid in names))


def leaves(farm: Farm, lease: Lease) -> None:
    """Its host let go of it: the lock is free, and placement retires the replica."""
    farm.lose(lease)
    catalog.retire(farm.client, MODEL, lease.replica)


def test_a_retired_replica_gives_back_what_it_left(farm: Farm) -> None:
    """Killed while it drained, say: its requests wait again, with their tokens, and its leader is fenced."""
    lease = leads(farm, "r0", OLD)
    began(farm, lease, "a", "b")
    assert catalog.retire(farm.client, MODEL, "r0") is None, "it leads"
    farm.lose(lease)
    assert catalog.retire(farm.client, MODEL, "r0") == 2
    assert catalog.retire(farm.client, MODEL, "r0") == 0, "the same call again"
    assert (farm.field("a", "state"), farm.load("queued")) == ("queued", 2)
    assert farm.run(catalog.replicas(MODEL)) == {} and not farm.client.exists(farm.keys.weights)
    assert int(farm.client.get(lease.keys.epoch) or 0) > lease.epoch
    [a, _] = farm.claim(leads(farm, "r1", OLD)).requests
    assert (a.rid, a.seq, a.attempts) == ("a", 1, 2)


def test_what_has_no_token_yet_is_anybody_s(farm: Farm) -> None:
    """Nothing was delivered, so it begins anew with the weights of whoever claims it."""
    lease = leads(farm, "r0", OLD)
    farm.put("a")
    farm.claim(lease)
    leaves(farm, lease)
    assert rids(farm.claim(leads(farm, "r1", NEW))) == ["a"]
    assert farm.field("a", "weights") == NEW


def test_what_began_with_other_weights_waits_for_a_replica_that_has_them(farm: Farm) -> None:
    """It blocks nobody: others of its tenant, and other tenants, are claimed past it, and it is not lost."""
    first, second, new = leads(farm, "r0", OLD), leads(farm, "r1", OLD), leads(farm, "r2", NEW)
    began(farm, first, "old")
    leaves(farm, first)
    farm.put("fresh")
    farm.put("other", tenant="u")
    assert sorted(rids(farm.claim(new))) == ["fresh", "other"]
    assert rids(farm.claim(new)) == [] and farm.load("queued") == 1
    [old] = farm.claim(second).requests
    assert (old.rid, old.seq) == ("old", 1)


def test_it_ends_with_the_reason_once_nobody_has_them(farm: Farm) -> None:
    """Never a silent mixture: the client is told."""
    first, new = leads(farm, "r0", OLD), leads(farm, "r2", NEW)
    began(farm, first, "old")
    leaves(farm, first)
    assert rids(farm.claim(new)) == []
    end = farm.look("old").entries[-1]
    assert (farm.field("old", "state"), end.finish, end.token) == ("finished", "error", None)
    assert "weights were replaced" in (end.cause or "") and farm.load("queued") == 0


def test_a_successor_under_the_same_name_adopts_only_what_it_can_continue(farm: Farm) -> None:
    """Adoption asks the same question as a claim."""
    first = leads(farm, "r0", OLD)
    leads(farm, "r1", OLD)
    began(farm, first, "old")
    farm.put("fresh")
    farm.claim(first)
    farm.lose(first)
    assert rids(farm.claim(leads(farm, "r0", NEW, owner="two"), adopt=True)) == ["fresh"]
    assert farm.field("old", "state") == "queued"


def test_a_takeover_leaves_to_its_replica_what_only_that_can_continue(farm: Farm) -> None:
    """It may come back to it; nothing is fenced for nothing."""
    first, new = leads(farm, "r0", OLD), leads(farm, "r1", NEW)
    began(farm, first, "old")
    farm.lose(first)
    assert [one.rid for one in farm.take_over(new, "r0")] == []
    assert rids(farm.claim(leads(farm, "r0", OLD, owner="two"), adopt=True)) == ["old"]


def test_without_fingerprints_the_weights_are_mixed(farm: Farm) -> None:
    """The control: a leader that does not tell its weights continues the other's answer."""
    first = leads(farm, "r0", OLD)
    began(farm, first, "old")
    leaves(farm, first)
    assert rids(farm.claim(farm.lead("r1"))) == ["old"]
