"""The checks of Redis, from its URL on: connection, certificate, servers, round trip, rights."""

from __future__ import annotations

import contextlib
import socket
import ssl
from dataclasses import dataclass, field

import redis
from redis import exceptions as redis_errors

from control.errors import FurrowError, RedisDenied, RedisUnavailable
from control.listening import is_loopback
from control.operations.checks.findings import Checks, Finding
from control.operations.checks.redis_server import Info, check_info, check_mode, check_round_trip
from control.redis.address import address, endpoint
from control.redis.clients import SyncRedis, credentials_of
from control.redis.connection import connect
from control.redis.round_trip import RoundTrip, measure
from control.redis.routing.cluster import ABSENT, Cluster
from ops.cli.doctor.certificate import check_certificate
from ops.cli.doctor.rights import check_rights

GREETING_S = 0.3


@dataclass
class RedisOutcome:
    """`trip` is None where Redis can't be used: nothing else can be checked then."""

    client: SyncRedis
    trip: RoundTrip | None = None
    findings: list[Finding] = field(default_factory=list[Finding])


def check_redis(named: str) -> RedisOutcome:
    """`named` is a URL, or a file that holds it. Raises SettingsError for one that can't be read."""
    client = connect(named)
    where = address(client)
    outcome, checks = RedisOutcome(client), Checks("redis", where)
    if where.startswith("rediss"):
        _check_tls(client, checks)
    try:
        _check_connection(client, checks)
        clustered = isinstance(client, Cluster)
        for server in client.primaries() if isinstance(client, Cluster) else [client]:
            own = Checks("redis", address(server))
            _check_server(server, own, clustered)
            checks.findings += own.findings
        if replicas := [one for one in checks.findings if one.check == "role" and one.level == "error"]:
            outcome.findings = replicas  # all else that goes wrong follows from it
            return outcome
        trip = measure(client)
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
    for server in client.primaries() if isinstance(client, Cluster) else [client]:
        server.ping()
    place = endpoint(client)
    _, password = credentials_of(client)
    if place is not None and not password and not is_loopback(place[0]):
        remedy = "Set `requirepass` or an ACL user on the server, and put the password into the URL (redis.md)."
        checks.warning("password", "the server asks for no password: prompts and answers pass through it", remedy)


def _greeting(client: SyncRedis) -> str:
    """What the server says before it is asked: the reason why it closes a connection at once, else nothing. The error
    of such a connection is that of the pipe, where the first command is sent after the end."""
    kwargs = client.connection_pool.connection_kwargs
    with contextlib.suppress(OSError, redis_errors.RedisError):
        path, place = kwargs.get("path"), endpoint(client)
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
    said = str(error) or type(error).__name__
    if isinstance(error, redis_errors.AuthenticationError):
        return (
            f"the server refused the password: {said}",
            "Put the right one into the URL: redis://:PASSWORD@HOST:PORT/0, for an ACL user redis://USER:PASSWORD@HOST:PORT/0.",
        )
    if "certificate" in said.lower() or "ssl" in said.lower():
        return f"no TLS connection: {said}", "See the certificate above; a server without TLS has a URL of redis://."
    if isinstance(error, redis_errors.BusyLoadingError):
        return "the server loads its data", "Wait until it is done: `redis-cli INFO persistence`."
    if said.startswith("BUSY "):
        return (
            f"a script of another program keeps the server from all else: {said}",
            "Run `redis-cli SCRIPT KILL`. Where that is refused, as the script has written, run `redis-cli SHUTDOWN "
            "NOSAVE` and start the server again, with its append-only file. Give Furrow a server of its own.",
        )
    if "Timeout reading" in said:
        return (
            f"the server accepts connections and does not answer: {said}",
            "On its machine, `ps -o pid,stat -C valkey-server,redis-server` shows T for a stopped process (`kill -CONT "
            "PID`) and D for one that waits for its disk. A `CLIENT PAUSE` ends by itself.",
        )
    if isinstance(error, redis_errors.ResponseError):
        return f"the server refuses the first commands: {said}", "Its log and its documentation have the reason."
    if "max number of clients" in f"{said} {greeting}":
        return (
            "the server refuses connections: as many clients as its maxclients allows are connected",
            "End a client that is not needed, then run `redis-cli CONFIG SET maxclients N` with twice the number at "
            "once, and write it into the server's configuration file; `redis-cli CLIENT LIST` shows who is connected.",
        )
    remedy = "Start it, or correct REDIS_URL or --redis: `redis-cli -h HOST -p PORT PING` must answer PONG here."
    return f"Redis can't be reached: {said}", remedy


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
            named = kwargs.get("ssl_ca_certs") or kwargs.get("ssl_ca_path")
            remedy = "Correct `ssl_ca_certs` in the URL: a file with the authority's certificate in PEM."
            checks.error("certificate", f"the authorities in {named} can't be read: {error}", remedy)
            return
        trusted.check_hostname = bool(kwargs.get("ssl_check_hostname", True))
        if kwargs.get("ssl_cert_reqs") in ("none", ssl.CERT_NONE):
            trusted.check_hostname, trusted.verify_mode = False, ssl.CERT_NONE
        check_certificate(place, trusted, checks)
