"""Images from the hosts that the operator allows: one GET at a time to an address that was checked, within bounds.

Each host and tenant has a share of the fetches, so that a host that hangs holds up nobody else.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from urllib.parse import urljoin

import httptools
import structlog

from api.http.errors import TooManyBodies
from api.images.hosts import AllowedHosts, CheckedUrl, UrlRefused, is_public
from control.errors import FurrowError

log = structlog.stdlib.get_logger(__name__)

AT_ONCE = 64
"""Fetches of an API process."""
OF_HOST = 16
OF_TENANT = 16
OF_TENANT_AT_HOST = 8
"""Less than the shares of the host and of the tenant: a tenant with slow answers leaves room for other tenants at that
host, and for its own fetches from other hosts."""


class FetchPlaces:
    """At most so many fetches at once, of which each host, each tenant and each tenant at a host has a share.

    Of the fetches for which there is room, one of the tenant with the fewest under way begins; of two such tenants, the
    one that was served longest ago.
    """

    def __init__(
        self,
        at_once: int = AT_ONCE,
        of_host: int = OF_HOST,
        of_tenant: int = OF_TENANT,
        of_tenant_at_host: int = OF_TENANT_AT_HOST,
    ) -> None:
        self._at_once = at_once
        self._of_host = of_host
        self._of_tenant = of_tenant
        self._of_tenant_at_host = of_tenant_at_host
        self._hosts: Counter[str] = Counter()
        self._tenants: Counter[str] = Counter()
        self._pairs: Counter[tuple[str, str]] = Counter()
        self._waiting: OrderedDict[tuple[str, str], deque[asyncio.Future[None]]] = OrderedDict()
        """By tenant and host; the pairs of the tenant that was served last come last."""

    @asynccontextmanager
    async def place(self, tenant: str, host: str) -> AsyncGenerator[None]:
        """Wait for a place; it is held until the block is left."""
        pair = tenant, host
        if pair not in self._waiting and self._has_room(pair):
            self._take(pair)
        else:
            await self._wait(pair)
        try:
            yield
        finally:
            self._give_back(pair)

    async def _wait(self, pair: tuple[str, str]) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(pair, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # the place was granted in the moment of the cancellation
                self._give_back(pair)
            elif turn in (line := self._waiting.get(pair, deque())):
                line.remove(turn)
                self._drop_empty(pair)
            raise

    def _has_room(self, pair: tuple[str, str]) -> bool:
        tenant, host = pair
        return (
            self._tenants.total() < self._at_once
            and self._hosts[host] < self._of_host
            and self._tenants[tenant] < self._of_tenant
            and self._pairs[pair] < self._of_tenant_at_host
        )

    def _take(self, pair: tuple[str, str]) -> None:
        tenant, host = pair
        self._tenants[tenant] += 1
        self._hosts[host] += 1
        self._pairs[pair] += 1

    def _give_back(self, pair: tuple[str, str]) -> None:
        tenant, host = pair
        self._tenants -= Counter({tenant: 1})  # without what has come to 0
        self._hosts -= Counter({host: 1})
        self._pairs -= Counter({pair: 1})
        self._begin_waiting()

    def _begin_waiting(self) -> None:
        """Begin the waiting fetches for which there is room."""
        while True:
            ready = [pair for pair in self._waiting if self._has_room(pair)]
            if not ready:
                return
            pair = min(
                ready, key=lambda ready_pair: self._tenants[ready_pair[0]]
            )  # the first of equals: served longest ago
            turn = self._waiting[pair].popleft()
            self._drop_empty(pair)
            if turn.done():  # cancelled, and its task has not run yet
                continue
            self._take(pair)
            for other in [other for other in self._waiting if other[0] == pair[0]]:
                self._waiting.move_to_end(other)
            turn.set_result(None)

    def _drop_empty(self, pair: tuple[str, str]) -> None:
        if not self._waiting[pair]:
            del self._waiting[pair]


_REDIRECTS = (301, 302, 303, 307, 308)
_HEAD_BYTES = 64 * 1024
"""Of status line and fields, and of what chunks of a body bring beside its bytes."""


class ResponseRefused(FurrowError):
    """An answer that is no image; the text says why."""


class Oversized(FurrowError):
    """A body with more bytes than there is room for."""


class HostResponse:
    """One answer while it comes. `location`: where it redirects to, None where it does not."""

    def __init__(self, room: int) -> None:
        self.location: str | None = None
        self.complete = False
        self.body = bytearray()
        self._room = room
        self._read = 0
        self._fields: dict[str, str] = {}
        self._refused: FurrowError | None = None
        self._parser = httptools.HttpResponseParser(self)

    def feed(self, chunk: bytes) -> None:
        """The next bytes, none at the connection's end. Raises ResponseRefused, Oversized."""
        if not chunk:
            self._end()
            return
        self._read += len(chunk)
        if self._read - len(self.body) > _HEAD_BYTES + len(chunk):
            raise ResponseRefused("its answer has a head of too many bytes")
        try:
            self._parser.feed_data(chunk)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if self._refused is None and not self.complete:
                raise ResponseRefused("its host does not answer in HTTP/1.1") from error
        if self._refused is not None:
            raise self._refused

    def _end(self) -> None:
        framed = "content-length" in self._fields or "transfer-encoding" in self._fields
        if framed or not self.body:
            raise ResponseRefused("its host ended the connection early")
        self.complete = True

    # --- what the parser calls; an error that is raised here would lose its type ---

    def on_header(self, name: bytes, value: bytes) -> None:
        self._fields[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        length = self._fields.get("content-length", "")
        coding = self._fields.get("content-encoding", "identity").strip().lower()
        if status in _REDIRECTS:
            self.location = self._fields.get("location", "")
            self.complete = True
        elif status != 200:
            self._refused = ResponseRefused(f"its host answers with status {status}")
        elif coding not in ("", "identity"):
            self._refused = ResponseRefused(f"its host sends it compressed ({coding[:20]!r}), unasked")
        elif length.isascii() and length.isdigit() and (len(length) > 15 or int(length) > self._room):
            self._refused = Oversized()

    def on_body(self, data: bytes) -> None:
        if self.complete or self._refused is not None:
            return
        if len(self.body) + len(data) > self._room:
            self._refused = Oversized()
        else:
            self.body += data

    def on_message_complete(self) -> None:
        self.complete = True


Resolve = Callable[[str, int], Awaitable[list[str]]]
"""From a host and a port to its addresses; raises OSError."""
Connect = Callable[[str, CheckedUrl], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]
"""A connection to an address for a URL, with TLS where its scheme says so; raises OSError."""

PATIENCE_S = 20.0
"""For all images of a request: names, connections, redirects, and the decoding between them."""
MOST_REDIRECTS = 3
MOST_LOOKUPS = 64
"""Names that are looked up at once."""
BUFFERED_BYTES = 64 * 1024 * 1024
"""Of all images that are fetched and not decoded yet."""
TENANT_BYTES = 32 * 1024 * 1024
"""Of those of one tenant."""
_READ_BYTES = 64 * 1024
_AGENT = "furrow"


class Fetcher:
    """Fetches images for all requests of an API process."""

    def __init__(
        self,
        hosts: AllowedHosts,
        resolve: Resolve | None = None,
        connect: Connect | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._hosts = hosts
        self.patience_s = patience_s
        self._resolve = resolve or Resolver(hosts.number).resolve
        self._connect = connect or Connector().connect
        self._places = FetchPlaces()
        self._buffered: Counter[str] = Counter()
        """Bytes by tenant."""

    async def fetch(self, url: str, room: int, until: float, tenant: str = "") -> bytes:
        """The body at `url`, of at most `room` bytes; it counts until `release`. `until`: by the loop's clock.

        Raises UrlRefused, Oversized, and TooManyBodies where others hold all memory.
        """
        self._hosts.checked(url)  # a refusal waits for no turn
        try:
            async with asyncio.timeout_at(until):
                return await self._follow(url, room, tenant)
        except TimeoutError:
            raise UrlRefused(
                f"could not be fetched: all images of a request have {self.patience_s:g} s; send it as data:"
            ) from None
        except (ResponseRefused, ssl.SSLError) as error:
            why = "TLS failed" if isinstance(error, ssl.SSLError) else str(error)
            raise UrlRefused(f"could not be fetched: {why}") from error
        except OSError as error:
            log.info("an image could not be fetched", action="fetch_image", error=repr(error))
            raise UrlRefused("could not be fetched: its host can't be reached") from error

    def release(self, data: bytes | bytearray, tenant: str = "") -> None:
        """Count the bytes of a fetched image no more."""
        self._buffered[tenant] -= len(data)
        if not self._buffered[tenant]:
            del self._buffered[tenant]

    async def _follow(self, url: str, room: int, tenant: str) -> bytes:
        checked = self._hosts.checked(url)
        for _ in range(MOST_REDIRECTS + 1):
            async with self._places.place(tenant, checked.host):
                answer = await self._get(checked, room, tenant)
            if answer.location is None:
                return bytes(answer.body)
            url = urljoin(f"{checked.scheme}://{checked.authority}{checked.target}", answer.location)
            secure = checked.scheme == "https"
            checked = self._hosts.checked(url)
            if secure and checked.scheme != "https":
                raise ResponseRefused("it is redirected from https to http")
        raise ResponseRefused(f"it is redirected more than {MOST_REDIRECTS} times")

    async def _get(self, checked: CheckedUrl, room: int, tenant: str) -> HostResponse:
        addresses = await self._resolve(checked.host, checked.port)
        # All of them: a name that also leads into a private network is no host of public images.
        if not addresses or not all(is_public(address) for address in addresses):
            raise UrlRefused(f"is on the host '{checked.host}', whose addresses are not all public")
        reader, writer = await self._connect(addresses[0], checked)
        answer = HostResponse(room)
        try:
            writer.write(
                f"GET {checked.target} HTTP/1.1\r\nHost: {checked.authority}\r\nUser-Agent: {_AGENT}\r\n"
                "Accept: image/*\r\nAccept-Encoding: identity\r\nConnection: close\r\n\r\n".encode("ascii")
            )
            while not answer.complete:
                chunk = await reader.read(_READ_BYTES)
                received = len(answer.body)
                try:
                    answer.feed(chunk)
                finally:
                    self._buffered[tenant] += len(answer.body) - received
                self._check_memory(tenant)
        except BaseException:
            self.release(answer.body, tenant)
            raise
        finally:
            writer.transport.abort()
        return answer

    def _check_memory(self, tenant: str) -> None:
        if self._buffered[tenant] > TENANT_BYTES:
            raise TooManyBodies(
                f"This API process fetches as many images of this tenant as its share of memory holds ({TENANT_BYTES} "
                "bytes). Retry shortly, or send them as data:."
            )
        if self._buffered.total() > BUFFERED_BYTES:
            raise TooManyBodies(
                f"This API process fetches as many images as its memory for them holds ({BUFFERED_BYTES} bytes). Retry "
                "shortly, or send them as data:."
            )


class Resolver:
    """The system's resolver, in threads of its own.

    A name is looked up once at a time for all that wait for it: a name server that hangs takes a thread for each of its
    hosts, however many fetches there are.
    """

    def __init__(self, hosts: int) -> None:
        """`hosts`: the number of names; each has a thread, up to a limit."""
        self._threads = ThreadPoolExecutor(max(1, min(hosts, MOST_LOOKUPS)), thread_name_prefix="resolve")
        self._lookups: dict[str, asyncio.Future[list[str]]] = {}

    async def resolve(self, host: str, port: int) -> list[str]:
        lookup = self._lookups.get(host)
        if lookup is None:
            loop = asyncio.get_running_loop()
            lookup = self._lookups[host] = loop.run_in_executor(self._threads, _addresses, host, port)
            lookup.add_done_callback(lambda done: self._end(host, done))
        return await asyncio.shield(lookup)  # others wait for it too

    def _end(self, host: str, lookup: asyncio.Future[list[str]]) -> None:
        self._lookups.pop(host, None)
        if not lookup.cancelled():
            lookup.exception()  # those that waited may all have gone


def _addresses(host: str, port: int) -> list[str]:
    return [str(row[4][0]) for row in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


class Connector:
    """Connects to an address; certificates are checked for the host's name."""

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        """`context`: the authorities that are trusted; None: those of the system."""
        self._context = context

    async def connect(self, address: str, checked: CheckedUrl) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if checked.scheme != "https":
            return await asyncio.open_connection(address, checked.port)
        if self._context is None:
            self._context = await asyncio.to_thread(ssl.create_default_context)
        return await asyncio.open_connection(address, checked.port, ssl=self._context, server_hostname=checked.host)
