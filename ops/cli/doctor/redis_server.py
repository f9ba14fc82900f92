"""Checks of `furrow doctor` on Redis: the server and its settings, its certificate, the rights of the farm's user."""

from __future__ import annotations

import contextlib
import socket
import ssl
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import redis
from cryptography import x509
from redis import exceptions as redis_errors

from control.errors import FurrowError, RedisDenied, RedisUnavailable
from control.keys import PREFIX
from control.listening import is_loopback
from control.operations.checks.findings import Checks, Finding
from control.operations.checks.redis_server import REFUSED_WRITES, Info, check_info, check_mode, check_round_trip
from control.redis.clients import SyncRedis, credentials_of
from control.redis.cluster import Cluster, servers_of
from control.redis.connection import connect, lacks_right, read, run
from control.redis.pipeline import ABSENT
from control.redis.servers import RoundTrip, measure_round_trip
from control.redis.urls import address, endpoint

GREETING_S = 0.3


@dataclass
class RedisOutcome:
    """`trip` is None where Redis can't be used: nothing else can be checked then."""

    client: SyncRedis
    trip: RoundTrip | None = None
    findings: list[Finding] = field(default_factory=list[Finding])


def check_redis(reference: str) -> RedisOutcome:
    """`reference` is a URL, or a file that holds it. Raises SettingsError for one that can't be read."""
    client = connect(reference)
    server_address = address(client)
    outcome = RedisOutcome(client)
    checks = Checks("redis", server_address)
    if server_address.startswith("rediss"):
        _check_tls(client, checks)
    try:
        _check_connection(client, checks)
        clustered = isinstance(client, Cluster)
        for server in servers_of(client):
            own = Checks("redis", address(server))
            _check_server(server, own, clustered)
            checks.findings += own.findings
        if replicas := [finding for finding in checks.findings if finding.check == "role" and finding.level == "error"]:
            outcome.findings = replicas  # all else that goes wrong follows from it
            return outcome
        trip = measure_round_trip(client)
        check_round_trip(trip, checks)
        if check_rights(client, checks):
            outcome.trip = trip  # else hosts and models seem to be away, as no process can work
    except (redis_errors.NoPermissionError, RedisDenied) as error:
        user, _ = credentials_of(client)
        remedy = f"Run `redis-cli ACL SETUSER {user} +ping +info +time +eval +evalsha '~furrow:*' '&furrow:*'`."
        checks.error("rights", f"the user '{user}' may not use Redis: {error}", remedy)
    except (FurrowError, redis_errors.ResponseError, *ABSENT) as error:
        checks.error("connection", *_described(error, _greeting(client)))
    outcome.findings = checks.findings
    return outcome


def _check_server(server: SyncRedis, checks: Checks, clustered: bool) -> None:
    with contextlib.suppress(redis_errors.ResponseError):  # the check of rights tells that INFO is denied
        info: Info = server.info()
        if "maxclients" not in info:  # before Redis 7
            info |= {"maxclients": next(iter(server.config_get("maxclients").values()), 0)}
        check_info(info, checks)
        check_mode(info, clustered, checks)


def _check_connection(client: SyncRedis, checks: Checks) -> None:
    """A server that anybody in its network can use. Raises what a first command raises."""
    for server in servers_of(client):
        server.ping()
    place = endpoint(client)
    _, password = credentials_of(client)
    if place is not None and not password and not is_loopback(place[0]):
        remedy = "Set `requirepass` or an ACL user on the server, and put the password into the URL (redis.md)."
        checks.warning("password", "the server asks for no password: prompts and answers pass through it", remedy)


def _greeting(client: SyncRedis) -> str:
    """The words of a server that closes a connection before any command, which say why; else nothing. The error
    of such a connection is that of the pipe, where the first command is sent after the end."""
    kwargs = client.connection_pool.connection_kwargs
    with contextlib.suppress(OSError, redis_errors.RedisError):
        path = kwargs.get("path")
        place = endpoint(client)
        with socket.socket(socket.AF_UNIX) if path else socket.create_connection(place or ("", 0), GREETING_S) as plain:
            plain.settimeout(GREETING_S)
            if path:
                plain.connect(path)
            return plain.recv(200).decode(errors="replace")
    return ""


def _described(error: Exception, greeting: str) -> tuple[str, str]:
    """An error of the first commands, and its remedy."""
    while isinstance(error, RedisUnavailable) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    text = str(error) or type(error).__name__
    if isinstance(error, redis_errors.AuthenticationError):
        return (
            f"the server refused the password: {text}",
            "Put the right one into the URL: redis://:PASSWORD@HOST:PORT/0, for an ACL user redis://USER:PASSWORD@HOST:PORT/0.",
        )
    if "certificate" in text.lower() or "ssl" in text.lower():
        return f"no TLS connection: {text}", "See the certificate above; a server without TLS has a URL of redis://."
    if isinstance(error, redis_errors.BusyLoadingError):
        return "the server loads its data", "Wait until it is done: `redis-cli INFO persistence`."
    if text.startswith("BUSY "):
        return (
            f"a script of another program keeps the server from all else: {text}",
            "Run `redis-cli SCRIPT KILL`. Where that is refused, as the script has written, run `redis-cli SHUTDOWN "
            "NOSAVE` and start the server again, with its append-only file. Give Furrow a server of its own.",
        )
    if "Timeout reading" in text:
        return (
            f"the server accepts connections and does not answer: {text}",
            "On its machine, `ps -o pid,stat -C valkey-server,redis-server` shows T for a stopped process (`kill -CONT "
            "PID`) and D for one that waits for its disk. A `CLIENT PAUSE` ends by itself.",
        )
    if isinstance(error, redis_errors.ResponseError):
        return f"the server refuses the first commands: {text}", "Its log and its documentation have the reason."
    if "max number of clients" in f"{text} {greeting}":
        return (
            "the server refuses connections: as many clients as its maxclients allows are connected",
            "End a client that is not needed, then run `redis-cli CONFIG SET maxclients N` with twice the number at "
            "once, and write it into the server's configuration file; `redis-cli CLIENT LIST` shows who is connected.",
        )
    remedy = "Start it, or correct REDIS_URL or --redis: `redis-cli -h HOST -p PORT PING` must answer PONG here."
    return f"Redis can't be reached: {text}", remedy


def _check_tls(client: SyncRedis, checks: Checks) -> None:
    try:
        place = endpoint(client)
    except redis.ConnectionError as error:
        checks.error("certificate", f"the primary is not known: {error}", "Check the Sentinels that the URL names.")
        return
    if place is not None:
        kwargs = client.connection_pool.connection_kwargs
        try:
            trusted = ssl.create_default_context(cafile=kwargs.get("ssl_ca_certs"), capath=kwargs.get("ssl_ca_path"))
        except OSError as error:  # SSLError included: the file holds no certificate
            authorities = kwargs.get("ssl_ca_certs") or kwargs.get("ssl_ca_path")
            remedy = "Correct `ssl_ca_certs` in the URL: a file with the authority's certificate in PEM."
            checks.error("certificate", f"the authorities in {authorities} can't be read: {error}", remedy)
            return
        trusted.check_hostname = bool(kwargs.get("ssl_check_hostname", True))
        if kwargs.get("ssl_cert_reqs") in ("none", ssl.CERT_NONE):
            trusted.check_hostname, trusted.verify_mode = False, ssl.CERT_NONE
        check_certificate(place, trusted, checks)


# --- the certificate --------------------------------------------------------------------------------------------------


SOON = timedelta(days=14)
WITHIN_S = 3.0


def check_certificate(place: tuple[str, int], trusted: ssl.SSLContext, checks: Checks) -> None:
    """Connect twice: once to read the certificate, whatever it is, and once as clients do, with `trusted`. Nothing is
    found where nothing answers: the connection's own check tells it."""
    try:
        certificate = _certificate(place)
    except (ssl.SSLError, ConnectionResetError, ValueError) as error:
        remedy = "Check that the server has TLS on this port; without TLS the URL begins with redis:// or http://."
        checks.error("certificate", f"there is no TLS at {place[0]}:{place[1]}: {error}", remedy)
        return
    except OSError:
        return
    now = datetime.now(UTC)
    ends = certificate.not_valid_after_utc
    begins = certificate.not_valid_before_utc
    validity = ends - now
    renew = "Renew the certificate of the server, and restart or reload the server."
    if validity < timedelta(0):
        checks.error("certificate", f"it expired on {ends:%Y-%m-%d}: clients refuse it", renew)
    elif begins > now:
        remedy = "Correct the clock of this host or of the server, or wait."
        checks.error("certificate", f"it is valid from {begins:%Y-%m-%d %H:%M} UTC on: clients refuse it", remedy)
    elif (refused := _refused(place, trusted)) is not None:
        remedy = (
            "Give the server a certificate for the name in the URL, from an authority that this host trusts, or name "
            "the authority's file: `?ssl_ca_certs=FILE` at the end of a Redis URL, SSL_CERT_FILE for others."
        )
        checks.error("certificate", f"this host does not trust it: {refused}", remedy)
    elif validity < SOON:
        checks.warning("certificate", f"it expires on {ends:%Y-%m-%d}, in {validity.days} days", renew)
    else:
        checks.ok("certificate", f"valid for {validity.days} days")


def _certificate(place: tuple[str, int]) -> x509.Certificate:
    """The server's own, unchecked. Raises OSError, ValueError."""
    anything = ssl.create_default_context()
    anything.check_hostname, anything.verify_mode = False, ssl.CERT_NONE
    with (
        socket.create_connection(place, WITHIN_S) as plain,
        anything.wrap_socket(plain, server_hostname=place[0]) as tls,
    ):
        return x509.load_der_x509_certificate(tls.getpeercert(binary_form=True) or b"")


def _refused(place: tuple[str, int], trusted: ssl.SSLContext) -> str | None:
    """The reason for which a client refuses the certificate, or None."""
    try:
        with socket.create_connection(place, WITHIN_S) as plain, trusted.wrap_socket(plain, server_hostname=place[0]):
            return None
    except ssl.SSLCertVerificationError as error:
        return error.verify_message
    except OSError:  # a server may ask for a certificate of the client, which the connection of Redis has
        return None


# --- rights -----------------------------------------------------------------------------------------------------------


PROBES: dict[str, tuple[str, ...]] = {
    "TIME": (),
    "PING": (),
    "SET": ("{key}:text", "1", "PX", "5000"),
    "GET": ("{key}:text",),
    "INCR": ("{key}:text",),
    "EXISTS": ("{key}:text",),
    "PEXPIRE": ("{key}:text", "5000"),
    "EXPIRE": ("{key}:text", "5"),
    "PTTL": ("{key}:text",),
    "TYPE": ("{key}:text",),
    "HSET": ("{key}:hash", "a", "1"),
    "HSETNX": ("{key}:hash", "a", "1"),
    "HGET": ("{key}:hash", "a"),
    "HMGET": ("{key}:hash", "a"),
    "HGETALL": ("{key}:hash",),
    "HKEYS": ("{key}:hash",),
    "HVALS": ("{key}:hash",),
    "HLEN": ("{key}:hash",),
    "HEXISTS": ("{key}:hash", "a"),
    "HSTRLEN": ("{key}:hash", "a"),
    "HINCRBY": ("{key}:hash", "a", "1"),
    "HDEL": ("{key}:hash", "a"),
    "SADD": ("{key}:set", "a"),
    "SCARD": ("{key}:set",),
    "SISMEMBER": ("{key}:set", "a"),
    "SMEMBERS": ("{key}:set",),
    "SREM": ("{key}:set", "a"),
    "ZADD": ("{key}:zset", "1", "a"),
    "ZINCRBY": ("{key}:zset", "1", "a"),
    "ZSCORE": ("{key}:zset", "a"),
    "ZCARD": ("{key}:zset",),
    "ZRANGE": ("{key}:zset", "0", "0"),
    "ZREVRANGE": ("{key}:zset", "0", "0"),
    "ZREVRANK": ("{key}:zset", "a"),
    "ZREMRANGEBYRANK": ("{key}:zset", "5", "6"),
    "ZRANK": ("{key}:zset", "a"),
    "ZRANGEBYLEX": ("{key}:zset", "-", "+"),
    "ZRANGEBYSCORE": ("{key}:zset", "0", "1"),
    "ZSCAN": ("{key}:zset", "0"),
    "ZREM": ("{key}:zset", "a"),
    "XADD": ("{key}:stream", "1-0", "a", "b"),
    "XGROUP": ("CREATE", "{key}:stream", "g", "0"),
    "XREADGROUP": ("GROUP", "g", "c", "COUNT", "1", "STREAMS", "{key}:stream", ">"),
    "XREAD": ("COUNT", "1", "STREAMS", "{key}:stream", "0"),
    "XCLAIM": ("{key}:stream", "g", "c", "0", "1-0"),
    "XACK": ("{key}:stream", "g", "1-0"),
    "XINFO": ("STREAM", "{key}:stream"),
    "XLEN": ("{key}:stream",),
    "XRANGE": ("{key}:stream", "-", "+"),
    "XREVRANGE": ("{key}:stream", "+", "-"),
    "XDEL": ("{key}:stream", "1-0"),
    "PUBLISH": ("{key}:events", ""),
    "RENAME": ("{key}:text", "{key}:other"),
    "UNLINK": ("{key}:hash", "{key}:set", "{key}:zset"),
    "DEL": ("{key}:stream", "{key}:text", "{key}:other"),
}
"""Command → harmless words. Commands of scripts and others have the same rights."""
_TRY = """
local found = {}
for index, probe in ipairs(cjson.decode(ARGV[1])) do
  local answer = redis.pcall(unpack(probe))
  found[index] = type(answer) == 'table' and answer.err or ''
end
return found
"""
_KEYS = ("text", "other", "hash", "set", "zset", "stream")


def check_rights(client: SyncRedis, checks: Checks) -> bool:
    """True if Furrow can work with the user's rights, on a server that takes writes. Raises RedisUnavailable."""
    key = f"{PREFIX}{{doctor}}:{uuid.uuid4().hex}"
    if refusal := _refused_write(client, f"{key}:text"):
        remedy = next(remedy for word, remedy in REFUSED_WRITES.items() if word in refusal)
        checks.error("writes", f"the server refuses writes: {refusal}", remedy)
        return False
    denied = _denied(client, key)
    denied |= _subscribing(client, f"{key}:events")
    for command, words in (("EVALSHA", ("0" * 40, 0)), ("INFO", ())):
        denied |= _refusal(command, _attempt(client, command, *words))
    if not denied:
        checks.ok("rights", "the user may run every command on Furrow's keys")
        return True
    commands = sorted(name.lower() for name, right in denied.items() if right == "command")
    words = [f"+{name}" for name in commands]
    subjects = [f"the command{'s' if len(commands) > 1 else ''} {', '.join(commands)}"] if commands else []
    if "key" in denied.values():
        words.append(f"'~{PREFIX}*'")
        subjects.append(f"the keys {PREFIX}*")
    if "channel" in denied.values():
        words.append(f"'&{PREFIX}*'")
        subjects.append(f"the channels {PREFIX}*")
    user = _user(client)
    remedy = f"Run `redis-cli ACL SETUSER {user} {' '.join(words)}` and `redis-cli ACL SAVE`, or edit the ACL file."
    # Without INFO the checks of the server are missing, and a lock that ran out is not taken again.
    level = "warning" if commands == ["info"] and len(subjects) == 1 else "error"
    checks.judge(level, "rights", f"the user '{user}' may not use {' and '.join(subjects)}", remedy)
    return level == "warning"


def _refused_write(client: SyncRedis, key: str) -> str:
    """The error of a server that refuses all plain writes, else nothing: the scripts of Redis 6.2 may
    write even so."""
    try:
        client.set(key, "1", px=5000)
        client.delete(key)
    except redis_errors.ResponseError as error:
        return str(error) if any(word in str(error) for word in REFUSED_WRITES) else ""
    return ""


def _denied(client: SyncRedis, key: str) -> dict[str, str]:
    """Command → the kind of right that it lacks: command, key or channel."""
    probes = [[name, *(word.replace("{key}", key) for word in words)] for name, words in PROBES.items()]
    keys = [f"{key}:{name}" for name in _KEYS]
    answer = _attempt(client, "EVAL", _TRY, len(keys), *keys, msgspec.json.encode(probes).decode())
    if isinstance(answer, Exception):
        return _refusal("EVAL", answer)
    refusals: dict[str, str] = {}
    for name, refusal_text in zip(PROBES, answer, strict=True):
        refusals |= _refusal(name, redis_errors.ResponseError(refusal_text))
    return refusals


def _attempt(client: SyncRedis, *words: Any) -> Any:
    """The answer, or the server's error."""
    try:
        return run(client, read(*words, parse=lambda reply: reply))
    except (redis_errors.ResponseError, RedisDenied) as error:
        return error


def _refusal(command: str, answer: Any) -> dict[str, str]:
    """The right that an error names; empty for any other answer."""
    if not isinstance(answer, RedisDenied) and not (isinstance(answer, Exception) and lacks_right(answer)):
        return {}
    text = str(answer).lower()
    return {command: "channel" if "channel" in text else "key" if "key" in text else "command"}


def _subscribing(client: SyncRedis, channel: str) -> dict[str, str]:
    pubsub = client.pubsub()
    try:
        pubsub.subscribe(channel)
        pubsub.get_message(timeout=1.0)
    except redis_errors.ResponseError as error:
        return _refusal("SUBSCRIBE", error)
    except redis_errors.RedisError:  # the connection is of no use; others have told so
        return {}
    finally:
        pubsub.close()
    return {}


def _user(client: SyncRedis) -> str:
    """The name of the connection's user."""
    with suppress(redis_errors.ResponseError, RedisUnavailable):
        return str(run(client, read("ACL", "WHOAMI", parse=str)))
    return credentials_of(client)[0]
