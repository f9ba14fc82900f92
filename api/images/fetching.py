"""Images from the hosts that the operator allows: one GET at a time to an address that was checked, within bounds."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urljoin

import structlog

from api.errors.errors import TooManyBodies
from api.images.answer import Answer, AnswerRefused
from api.images.hosts import Hosts, Place, UrlRefused, is_public
from api.images.places import FetchPlaces

log = structlog.stdlib.get_logger(__name__)

Resolve = Callable[[str, int], Awaitable[list[str]]]
"""From a host and a port to its addresses; raises OSError."""
Connect = Callable[[str, Place], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]
"""A connection to an address for a place, with TLS where its scheme says so; raises OSError."""

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
        hosts: Hosts,
        resolve: Resolve | None = None,
        connect: Connect | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._hosts, self.patience_s = hosts, patience_s
        self._resolve = resolve or Resolver(hosts.number).resolve
        self._connect = connect or Connector().connect
        self._places = FetchPlaces()
        self._buffered: Counter[str] = Counter()
        """Bytes by tenant."""

    async def fetch(self, url: str, room: int, until: float, tenant: str = "") -> bytes:
        """The body at `url`, of at most `room` bytes; it counts until `release`. `until`: by the loop's clock.

        Raises UrlRefused, Oversized, and TooManyBodies where others hold all memory.
        """
        self._hosts.place(url)  # a refusal waits for no turn
        try:
            async with asyncio.timeout_at(until):
                return await self._follow(url, room, tenant)
        except TimeoutError:
            raise UrlRefused(
                f"could not be fetched: all images of a request have {self.patience_s:g} s; send it as data:"
            ) from None
        except (AnswerRefused, ssl.SSLError) as error:
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
        place = self._hosts.place(url)
        for _ in range(MOST_REDIRECTS + 1):
            async with self._places.place(tenant, place.host):
                answer = await self._get(place, room, tenant)
            if answer.location is None:
                return bytes(answer.body)
            url = urljoin(f"{place.scheme}://{place.authority}{place.target}", answer.location)
            secure, place = place.scheme == "https", self._hosts.place(url)
            if secure and place.scheme != "https":
                raise AnswerRefused("it is redirected from https to http")
        raise AnswerRefused(f"it is redirected more than {MOST_REDIRECTS} times")

    async def _get(self, place: Place, room: int, tenant: str) -> Answer:
        addresses = await self._resolve(place.host, place.port)
        # All of them: a name that also leads into a private network is no host of public images.
        if not addresses or not all(is_public(address) for address in addresses):
            raise UrlRefused(f"is on the host '{place.host}', whose addresses are not all public")
        reader, writer = await self._connect(addresses[0], place)
        answer = Answer(room)
        try:
            writer.write(
                f"GET {place.target} HTTP/1.1\r\nHost: {place.authority}\r\nUser-Agent: {_AGENT}\r\n"
                "Accept: image/*\r\nAccept-Encoding: identity\r\nConnection: close\r\n\r\n".encode("ascii")
            )
            while not answer.complete:
                chunk = await reader.read(_READ_BYTES)
                held = len(answer.body)
                try:
                    answer.feed(chunk)
                finally:
                    self._buffered[tenant] += len(answer.body) - held
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

    async def connect(self, address: str, place: Place) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if place.scheme != "https":
            return await asyncio.open_connection(address, place.port)
        if self._context is None:
            self._context = await asyncio.to_thread(ssl.create_default_context)
        return await asyncio.open_connection(address, place.port, ssl=self._context, server_hostname=place.host)
