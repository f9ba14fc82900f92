"""The check that Furrow's keys have their types: a key that another program, or a hand, has written over."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping

from control import keys
from control.keys import CLASSES, ModelKeys, ReplicaKeys
from control.operations.checks.findings import Checks
from control.redis.clients import SyncRedis
from control.redis.connection import read, run, run_every

_FARM = {
    keys.MODELS: "set",
    keys.MODELS_VERSION: "string",
    keys.METERED: "set",
    keys.HOSTS: "set",
    keys.DRAINED: "set",
    keys.APIS: "set",
    keys.API_RECORDS: "hash",
    keys.API_KEYS: "set",
    keys.PLACEMENT_LOCK: "string",
    keys.OVERVIEWS: "string",
}


def check_key_types(client: SyncRedis, checks: Checks) -> bool:
    """True if every key that processes can't do without has its type, or is absent. Raises RedisUnavailable."""
    wrong = _wrong(client, _FARM)
    if not wrong.keys() & {keys.MODELS, keys.HOSTS}:
        models = sorted(run(client, read("SMEMBERS", keys.MODELS, parse=set[str])))
        wrong |= _wrong(client, {name: kind for model in models for name, kind in _of_model(model).items()})
        wrong |= _wrong(client, {name: kind for model in models for name, kind in _of_parts(client, model, wrong)})
        hosts = run(client, read("SMEMBERS", keys.HOSTS, parse=set[str]))
        wrong |= _wrong(client, {name: kind for host in hosts for name, kind in _of_host(host).items()})
    for name, (kind, present) in sorted(wrong.items()):
        checks.error(
            "key",
            f"{name} is a {present} and not a {kind}: another program wrote it, and Furrow waits",
            remedy_for_key(client, name),
        )
    return not wrong


def remedy_for_key(client: SyncRedis, name: str) -> str:
    """The command that deletes a key which Furrow can't read."""
    database = client.connection_pool.connection_kwargs.get("db") or 0
    number = f" -n {database}" if database else ""
    return (
        f"Run `redis-cli{number} DEL {shlex.quote(name)}`: Furrow makes it anew, without what it held. Find who "
        "wrote it (`redis-cli MONITOR`), and give Furrow a server of its own."
    )


def _wrong(client: SyncRedis, types: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Key → the type that it should have, and the one that it has."""
    present = run_every(client, [read("TYPE", name, parse=str) for name in types])
    return {
        name: (kind, has) for (name, kind), has in zip(types.items(), present, strict=True) if has not in (kind, "none")
    }


def _of_model(model: str) -> dict[str, str]:
    of = ModelKeys(model)
    types = dict.fromkeys((of.spec, of.replicas, of.weights, of.backends, of.assets, of.load, of.docket), "hash")
    types |= dict.fromkeys((of.bell, of.dead, of.settlements), "stream")
    types |= dict.fromkeys((of.orphans, of.deadlines), "zset")
    types |= {
        name: "zset" for one in CLASSES for name in (of.turns(one), of.served(one), of.waiting(one), of.debts(one))
    }
    return types


def _of_parts(client: SyncRedis, model: str, wrong: Mapping[str, object]) -> Iterable[tuple[str, str]]:
    """Keys of the model's replicas and of the tenants that wait or run, as far as those can be listed."""
    of = ModelKeys(model)
    if of.replicas not in wrong:
        for replica in run(client, read("HKEYS", of.replicas, parse=list[str])):
            yield from _of_replica(ReplicaKeys(model, replica)).items()
    for one in CLASSES:
        if of.served(one) not in wrong:
            for tenant in run(client, read("ZRANGE", of.served(one), 0, -1, parse=list[str])):
                yield of.queue(one, tenant), "stream"


def _of_replica(of: ReplicaKeys) -> dict[str, str]:
    types = dict.fromkeys((of.lock, of.epoch, of.server, of.claim), "string")
    types |= dict.fromkeys((of.poison, of.status, of.ends, of.heartbeat(0)), "hash")
    types |= dict.fromkeys((of.poisons, of.epochs), "stream")
    return types | {of.running: "zset"}


def _of_host(host: str) -> dict[str, str]:
    return {
        keys.host(host): "hash",
        keys.assignments(host): "hash",
        keys.host_facts(host): "string",
        keys.host_loads(host): "hash",
        keys.memory_deaths(host): "stream",
    }
