"""The place where the ranks of an epoch meet: keys of Redis."""

from __future__ import annotations

from control.constants import MEETING_MS
from control.keys import ReplicaKeys
from control.redis.clients import SyncRedis


class RedisStore:
    """What the ranks of one epoch tell each other while they form a group. Each key outlives the time for which
    a rank waits for it."""

    def __init__(self, client: SyncRedis, keys: ReplicaKeys, epoch: int) -> None:
        self._client, self._keys, self._epoch = client, keys, epoch

    def set(self, key: str, value: str) -> None:
        self._client.set(self._keys.meeting(self._epoch, key), value, px=MEETING_MS)

    def check(self, keys: list[str]) -> bool:
        """True if every one of `keys` is there."""
        return all(self._client.exists(self._keys.meeting(self._epoch, key)) for key in keys)

    def get(self, key: str) -> bytes:
        """The value of a key that was there a moment ago; empty where it is gone."""
        return str(self._client.get(self._keys.meeting(self._epoch, key)) or "").encode()
