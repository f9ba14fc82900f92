"""API keys are stored, found by id and revoked."""

from __future__ import annotations

import time

import msgspec
import pytest

from control import access
from control.errors import KeyNotFound, SettingsError
from control.keys import KeyKeys
from tests.contract.conftest import Farm


def test_a_key_is_kept_without_its_secret(farm: Farm) -> None:
    """Its record has all but the secret, of which only the SHA-256 is anywhere in Redis."""
    key, secret = access.mint(name="ada", tenant="team", admin=True, rpm=5, models=["b", "a"], priority_cap="low")
    access.create(farm.client, key)
    assert access.key_id_of(secret) == key.id
    assert farm.run(access.get(key.id)) == key
    assert key.models == ["a", "b"]
    assert access.hash_secret(secret) == key.sha256
    assert secret not in str(farm.client.hgetall(KeyKeys(key.id).record))


def test_a_tenant_and_a_name_of_its_own(farm: Farm) -> None:
    """A key that is given neither has its id for both."""
    key, _ = access.mint()
    assert (key.name, key.tenant) == (key.id, key.id)


def test_every_change_is_a_new_version(farm: Farm) -> None:
    """A cache of keys learns of each change from one number."""
    versions = [farm.run(access.version())]
    key, _ = access.mint()
    access.create(farm.client, key)
    versions.append(farm.run(access.version()))
    key = access.change(farm.client, key, rpm=7)
    versions.append(farm.run(access.version()))
    access.revoke(farm.client, key)
    versions.append(farm.run(access.version()))
    assert versions == [0, 1, 2, 3]


def test_a_revoked_key_stays_revoked_and_goes_in_the_end(farm: Farm) -> None:
    """Revoking twice keeps the first moment; the record has an end, the list forgets it with it."""
    key, _ = access.mint()
    access.create(farm.client, key)
    revoked = access.revoke(farm.client, key)
    assert revoked.state(time.time()) == "revoked"
    assert access.revoke(farm.client, revoked).revoked == revoked.revoked
    assert farm.client.ttl(KeyKeys(key.id).record) > 0
    farm.client.delete(KeyKeys(key.id).record)
    assert access.list_keys(farm.client) == []


def test_a_name_finds_the_key_that_works(farm: Farm) -> None:
    """An id always does, a name as long as one key of that name is not revoked."""
    first, _ = access.mint(name="ada")
    second, _ = access.mint(name="ada")
    for key in (first, second):
        access.create(farm.client, key)
    assert access.find(farm.client, second.id) == second
    with pytest.raises(KeyNotFound, match="say which one by its id"):
        access.find(farm.client, "ada")
    access.revoke(farm.client, first)
    assert access.find(farm.client, "ada") == second
    with pytest.raises(KeyNotFound, match="no API key 'eve'"):
        access.find(farm.client, "eve")


def test_when_it_was_last_used(farm: Farm) -> None:
    """Never at first; noting it does not bring a record back that has gone."""
    key, _ = access.mint()
    access.create(farm.client, key)
    assert access.list_keys(farm.client) == [(key, 0)]
    farm.run(access.note_used(key.id, 1234))
    assert access.list_keys(farm.client) == [(key, 1234)]
    farm.client.delete(KeyKeys(key.id).record)
    farm.run(access.note_used(key.id, 1235))
    assert farm.run(access.get(key.id)) is None


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"rpm": -1}, "rpm.*-1"),
        ({"priority_cap": "urgent"}, "'urgent'"),
        ({"tenant": "a b"}, "'a b'"),
        ({"expires": 5}, "expire at 5"),
        ({"name": "x" * 201}, "200"),
        ({"name": "a\nb"}, "printable"),
    ],
)
def test_what_can_not_be_is_refused(fields: dict[str, object], named: str) -> None:
    """The message has the value."""
    with pytest.raises(SettingsError, match=named):
        access.mint(**fields)  # type: ignore[arg-type]


def test_what_was_lost_is_written_back(farm: Farm) -> None:
    """All of a key that is gone, nothing of one that is there; but a revocation stands."""
    lost, active, shut = (access.mint(name=name)[0] for name in ("lost", "kept", "shut"))
    for key in (active, shut):
        access.create(farm.client, key)
    changed = access.change(farm.client, active, rpm=9)
    revoked = msgspec.structs.replace(shut, revoked=77)
    for key in (lost, active, revoked):
        for call in access.restore(key):
            farm.run(call)
    assert farm.run(access.get(lost.id)) == lost
    assert farm.run(access.get(active.id)) == changed
    assert farm.run(access.get(shut.id)) == revoked
    assert len(access.list_keys(farm.client)) == 3
