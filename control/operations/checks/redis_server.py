"""Checks of one Redis server: version, role, eviction, persistence, memory, clients, and the types of all keys."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from control import keys
from control.keys import CLASSES, ModelKeys, ReplicaKeys
from control.operations.checks.findings import Checks
from control.redis.clients import SyncRedis
from control.redis.connection import read, run, run_every
from control.redis.servers import NEARLY_FULL, RoundTrip
from control.sizes import in_words
from control.version import OLDEST_REDIS

Info = dict[str, Any]
# Limits of a round trip.
SLOW_MS = 5.0
TOO_SLOW_MS = 100.0
MANY_CLIENTS = 0.8
"""Part of `maxclients`."""
KEEP = "and write the same into its configuration file, or it is lost at the next start"


def check_info(info: Info, checks: Checks) -> None:
    """Every check of a server that one reading of INFO allows."""
    for check in CHECKS:
        check(info, checks)


def check_version(info: Info, checks: Checks) -> None:
    kind, version = kind_and_version(info)
    if kind not in ("Redis", "Valkey"):
        remedy = "Use Redis 6.2 to 8 or Valkey 7.2 to 9, on which Furrow is tested."
        checks.warning("version", f"{kind} {version} is a server that Furrow is not tested on", remedy)
        return
    numbers = tuple(int(part) for part in str(info.get("redis_version", "0")).split(".")[:2] if part.isdecimal())
    if numbers < OLDEST_REDIS:
        checks.error("version", f"{kind} {version} is too old", "Install Redis 6.2 or newer, or Valkey 7.2 or newer.")
    else:
        checks.ok("version", f"{kind} {version}")


def kind_and_version(info: Info) -> tuple[str, str]:
    """The name of the server and its own version, which is not always the Redis version that it is compatible with."""
    for name in ("dragonfly", "kvrocks", "keydb"):
        if f"{name}_version" in info:
            return name.capitalize(), str(info[f"{name}_version"])
    version = str(info.get("redis_version", "unknown"))
    if "valkey_version" in info or info.get("server_name") == "valkey":
        return "Valkey", str(info.get("valkey_version", version))
    return "Redis", version


def check_mode(info: Info, clustered: bool, checks: Checks) -> None:
    """`clustered`: the URL is that of a Cluster."""
    mode = str(info.get("redis_mode") or info.get("server_mode") or "standalone")
    if mode == "sentinel":
        remedy = "Write the URL as redis+sentinel://HOST:PORT,HOST:PORT/NAME."
        checks.error("role", "the server is a Sentinel and not a primary", remedy)
    elif mode == "cluster" and not clustered:
        remedy = "Write the URL as redis+cluster://HOST:PORT,HOST:PORT."
        checks.error("role", "the server belongs to a Cluster, which the URL does not say", remedy)


def check_role(info: Info, checks: Checks) -> None:
    if info.get("role") == "slave":
        primary = f"{info.get('master_host', '?')}:{info.get('master_port', '?')}"
        own = "Where this server is to be the primary, run `redis-cli REPLICAOF NO ONE`."
        remedy = f"Name its primary in the URL: {primary}. {own}"
        checks.error("role", "the server is a replica and takes no writes, so nothing is served", remedy)


REFUSED_WRITES = {
    "NOREPLICAS": "Start the replicas that it lacks, or run `redis-cli CONFIG SET min-replicas-to-write 0`, "
    f"{KEEP}. Requests go on at once.",
    "MISCONF": "Free the disk and the memory of the server, then run `redis-cli BGSAVE`; its log has the reason.",
}
"""First word of a server that refuses writes, and the remedy."""


def check_replicas(info: Info, checks: Checks) -> None:
    """A server that is to have replicas before it writes, and has none: INFO shows a count only on such a server."""
    if int(info.get("min_slaves_good_slaves", 1)) == 0:
        message = (
            "the server refuses writes, as no replica of it is there (min-replicas-to-write), so nothing is served"
        )
        checks.error("writes", message, REFUSED_WRITES["NOREPLICAS"])


def check_eviction(info: Info, checks: Checks) -> None:
    policy = str(info.get("maxmemory_policy", "noeviction"))
    limit = int(info.get("maxmemory", 0))
    remedy = f"Run `redis-cli CONFIG SET maxmemory-policy noeviction`, {KEEP}."
    if policy == "noeviction":
        checks.ok("eviction", "maxmemory-policy is noeviction")
    elif limit:
        message = f"maxmemory-policy is {policy}: a full server deletes queued requests. Workers refuse to start"
        checks.error("eviction", message, remedy)
    else:
        message = f"maxmemory-policy is {policy}: once maxmemory is set, a full server deletes queued requests"
        checks.warning("eviction", message, remedy)


def check_persistence(info: Info, checks: Checks) -> None:
    if not int(info.get("aof_enabled", 0)):
        remedy = f"Run `redis-cli CONFIG SET appendonly yes`, {KEEP}."
        checks.warning("persistence", "the append-only file is off: a restart loses requests and API keys", remedy)
    elif info.get("aof_last_write_status", "ok") != "ok":
        remedy = "Free the disk of the server's `dir`, and read the server's log."
        checks.error("persistence", "the last write to the append-only file failed", remedy)
    else:
        checks.ok("persistence", "the append-only file is on")
    if info.get("rdb_last_bgsave_status", "ok") != "ok":
        remedy = "Free the disk and the memory of the server, then run `redis-cli BGSAVE`; its log has the reason."
        checks.error("snapshot", "the last snapshot failed: the server may refuse writes (MISCONF)", remedy)


def check_memory(info: Info, checks: Checks) -> None:
    used, limit, machine = (int(info.get(name, 0)) for name in ("used_memory", "maxmemory", "total_system_memory"))
    more = f"Run `redis-cli CONFIG SET maxmemory SIZE` with more than {in_words(max(limit, used))}, {KEEP}."
    if limit:
        level = "error" if used >= limit else "warning" if used >= NEARLY_FULL * limit else "ok"
        full = {"error": ": new requests are refused", "warning": ": new requests will be refused", "ok": ""}
        checks.judge(level, "memory", f"{in_words(used)} of {in_words(limit)} are used{full[level]}", more)
    elif machine and used > machine / 2:
        message = f"{in_words(used)} are used without a limit, more than half of the machine's {in_words(machine)}"
        checks.warning("memory", message, f"Set one below the memory that is free: {more}")
    else:
        checks.ok("memory", f"{in_words(used)} are used, without a limit")


def check_clients(info: Info, checks: Checks) -> None:
    connected = int(info.get("connected_clients", 0))
    most = int(info.get("maxclients", 0))
    if most and connected >= MANY_CLIENTS * most:
        remedy = (
            f"Run `redis-cli CONFIG SET maxclients {2 * most}`, {KEEP}; raise the server's limit of open files too."
        )
        checks.warning("clients", f"{connected} of at most {most} clients are connected", remedy)


CHECKS: tuple[Callable[[Info, Checks], None], ...] = (
    check_version,
    check_role,
    check_eviction,
    check_persistence,
    check_memory,
    check_clients,
)


def check_round_trip(trip: RoundTrip, checks: Checks) -> None:
    level = "error" if trip.ms > TOO_SLOW_MS else "warning" if trip.ms > SLOW_MS else "ok"
    remedy = (
        "Run Redis in the network of the workers, on a machine with an idle core; `redis-cli --latency` and "
        "`redis-cli SLOWLOG GET 10` show where the time goes."
    )
    late = "" if level == "ok" else ": each step of a model waits for two"
    checks.judge(level, "round trip", f"{trip.ms:.2g} ms{late}", remedy)


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
