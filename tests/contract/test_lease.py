"""One leader holds the lock and its epoch."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from control.constants import LOCK_MS
from control.errors import Fenced, Lost
from control.redis.connection import run_all
from control.replicas import health
from control.replicas.lease import Lease, acquire, close_epoch, holder, release, release_token, renew
from control.requests import Emission
from tests.contract.conftest import MODEL, Farm, token


def test_only_one_holds_the_lock(farm: Farm) -> None:
    """While one owner holds the lock another one gets none."""
    lease = farm.lead(owner="one")
    assert farm.run(acquire(MODEL, "r0", "two", 1)) is None
    assert farm.run(holder(MODEL, "r0")) == lease.token


def test_an_epoch_is_always_greater_than_any_before(farm: Farm) -> None:
    """Each acquisition moves the epoch on, also past the caller's own last one."""
    first = farm.lead()
    farm.run(release(first))
    second = farm.lead()
    farm.run(release(second))
    third = farm.lead(floor=second.epoch + 10**6)
    assert first.epoch < second.epoch < third.epoch
    assert third.epoch == second.epoch + 10**6 + 1


def test_an_epoch_grows_over_a_loss_of_everything(farm: Farm) -> None:
    """After a flush the next epoch is still greater: the server's clock sees to it."""
    first = farm.lead()
    farm.client.flushall()
    assert farm.lead(floor=first.epoch).epoch > first.epoch


def test_a_lost_epoch_is_closed_for_all(farm: Farm) -> None:
    """Once its lock is gone the epoch moves on, as often as it is said; not while somebody leads."""
    lease = farm.lead()
    assert farm.run(close_epoch(lease)) is False
    assert health.read_epoch(farm.client, MODEL, "r0") == lease.epoch
    farm.lose(lease)
    assert [farm.run(close_epoch(lease)) for _ in range(2)] == [True, True]
    assert health.read_epoch(farm.client, MODEL, "r0") == lease.epoch + 1
    farm.client.flushall()
    assert farm.run(close_epoch(lease)) is True
    assert health.read_epoch(farm.client, MODEL, "r0") == lease.epoch + 1


def test_acquiring_twice_after_a_lost_reply_is_one_epoch(farm: Farm) -> None:
    """The same call again returns the same lease."""
    call = acquire(MODEL, "r0", "one", 2)
    assert farm.run(call) == farm.run(call)


def test_an_owner_does_not_get_its_old_epoch_again(farm: Farm) -> None:
    """With its last epoch as floor an owner that still holds the lock must release first."""
    lease = farm.lead()
    assert farm.run(acquire(MODEL, "r0", "one", 1, floor=lease.epoch)) is None


def test_a_new_epoch_sweeps_the_streams_and_the_poison_of_the_old_one(farm: Farm) -> None:
    """No stale command, reply or poison is left to be read."""
    old = farm.lead(world_size=3)
    gone = [old.keys.commands(old.epoch, 1), old.keys.commands(old.epoch, 2), old.keys.replies(old.epoch)]
    for stream in gone:
        farm.client.xadd(stream, {"m": "x"})
    farm.client.hset(old.keys.poison, "epoch", old.epoch)
    farm.run(release(old))
    farm.lead(world_size=3)
    assert farm.client.exists(*gone, old.keys.poison) == 0


def test_renewing_keeps_the_lock_and_the_streams_alive(farm: Farm) -> None:
    """A renewal sets the life of the lock and of the epoch's streams anew."""
    lease = farm.lead(world_size=2)
    stream = lease.keys.commands(lease.epoch, 1)
    farm.client.xadd(stream, {"m": "x"})
    farm.client.pexpire(lease.keys.lock, 100)
    farm.run(renew(lease, 2))
    assert farm.client.pttl(lease.keys.lock) > LOCK_MS - 500
    assert farm.client.pttl(stream) > 50_000


def test_an_epoch_that_redis_has_lost_comes_back(farm: Farm) -> None:
    """Evicted or deleted beside a lock that is held: without it ranks and views take the leader for one of no epoch."""
    lease = farm.lead(world_size=2)
    farm.client.delete(lease.keys.epoch)
    farm.run(renew(lease, 2))
    assert farm.client.get(lease.keys.epoch) == str(lease.epoch)


def test_a_lock_that_ran_out_is_taken_again(farm: Farm) -> None:
    """Where nobody led meanwhile, the same epoch goes on: a renewal says so once, and what the epoch wrote counts."""
    if farm.url is None:
        pytest.skip("the fake has no INFO in scripts, so its locks are never taken again")
    lease = farm.lead(world_size=2)
    farm.put("a")
    farm.claim(lease)
    farm.lose(lease)
    assert [farm.run(renew(lease, 2)) for _ in range(2)] == [True, False]
    assert farm.run(holder(MODEL, "r0")) == lease.token
    assert LOCK_MS - 500 < farm.client.pttl(lease.keys.lock) <= LOCK_MS
    assert farm.emit(lease, Emission("a", 1, [token(1)])).taken == []
    assert farm.run(acquire(MODEL, "r0", "two", 2)) is None


def another_leads(farm: Farm, lease: Lease) -> None:
    """It led for a moment, and its lock ran out too."""
    farm.lose(farm.lead(owner="two", floor=lease.epoch))


def is_taken_over(farm: Farm, lease: Lease) -> None:
    """Another replica took the request of this one."""
    other = farm.lead("r1", owner="two")
    assert [one.rid for one in farm.take_over(other, "r0")] == ["a"]


def server_is_another(farm: Farm, lease: Lease) -> None:
    """It was started again, or a replica of it was promoted: the last writes may be missing."""
    farm.client.set(lease.keys.server, "0" * 40)


def commands_lapsed(farm: Farm, lease: Lease) -> None:
    """Nobody renewed for so long that the streams of the epoch, and with them this key, are gone."""
    farm.client.delete(lease.keys.server)


def epoch_was_rolled_back(farm: Farm, lease: Lease) -> None:
    farm.client.set(lease.keys.epoch, lease.epoch - 1)


def epoch_was_closed(farm: Farm, lease: Lease) -> None:
    assert farm.run(close_epoch(lease))


def was_released(farm: Farm, lease: Lease) -> None:
    """A renewal of a leader that has left arrives late."""
    farm.client.set(lease.keys.lock, lease.token)
    assert farm.run(release(lease))


@pytest.mark.parametrize(
    "meanwhile",
    [
        another_leads,
        is_taken_over,
        server_is_another,
        commands_lapsed,
        epoch_was_rolled_back,
        epoch_was_closed,
        was_released,
    ],
)
def test_a_lock_is_not_taken_again_after_anything_happened(
    farm: Farm, meanwhile: Callable[[Farm, Lease], None]
) -> None:
    """Each of these ends the epoch: what it sent or wrote may be lost, or another leader's."""
    lease = farm.lead(world_size=2)
    farm.put("a")
    farm.claim(lease)
    farm.lose(lease)
    meanwhile(farm, lease)
    with pytest.raises((Lost, Fenced)):
        farm.run(renew(lease, 2))
    assert farm.run(holder(MODEL, "r0")) is None


def test_lost_is_told_from_fenced(farm: Farm) -> None:
    """LOST while nobody moved the epoch on; FENCED once somebody did, whether the lock is held or not."""
    lease = farm.lead()
    farm.lose(lease)
    with pytest.raises(Lost):
        farm.emit(lease, Emission("a", 1, [token(1)]))
    farm.client.delete(lease.keys.epoch)
    with pytest.raises(Lost):
        farm.run(renew(lease, 1))
    other = farm.lead(owner="two", floor=lease.epoch)
    with pytest.raises(Fenced):
        farm.run(renew(lease, 1))
    farm.lose(other)
    with pytest.raises(Fenced):
        farm.run(renew(lease, 1))


def test_a_rolled_back_epoch_is_lost_not_fenced(farm: Farm) -> None:
    """After a failover that forgot the newest epoch nobody has taken over, so the leader may acquire again."""
    lease = farm.lead()
    farm.lose(lease)
    farm.client.set(lease.keys.epoch, lease.epoch - 1)
    with pytest.raises(Lost):
        farm.run(renew(lease, 1))


def test_releasing_frees_exactly_the_own_token(farm: Farm) -> None:
    """A token that is not the holder's releases nothing."""
    lease = farm.lead()
    assert farm.run(release_token(MODEL, "r0", "one:1")) is False
    assert farm.run(holder(MODEL, "r0")) == lease.token
    assert farm.run(release(lease)) is True
    assert farm.run(release(lease)) is False
    assert farm.run(holder(MODEL, "r0")) is None


def test_an_error_of_one_call_spares_the_others(farm: Farm) -> None:
    """In a batch the refused call's error stands in its place."""
    lease = farm.lead()
    farm.run(release(lease))
    lost, held = run_all(farm.client, [renew(lease, 1), holder(MODEL, "r0")])
    assert isinstance(lost, Lost)
    assert held is None
