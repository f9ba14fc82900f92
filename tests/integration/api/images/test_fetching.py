"""Images are fetched from allowed hosts alone: a local server stands for them, by a resolver and a connector of the
test. Names, addresses, answers and times are checked by the code that runs in production."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from api.images import fetching
from api.images.fetching import Connector, Fetcher, FetchPlaces, Oversized
from api.images.hosts import AllowedHosts, CheckedUrl, UrlRefused
from api.images.loading import ImageLoader, RequestImages
from api.schemas.image_parts import ImageSource
from control.errors import RequestError
from control.messages import ImageInput
from tests.integration.ops.cli.tls_front import certificate

PUBLIC = "93.184.216.34"
URL = "http://img.example.com/a.png"
IMAGE = b"\x89PNG and so on"


def answer(body: bytes = IMAGE, *fields: str, status: str = "200 OK", length: int | None = None) -> bytes:
    head = [f"HTTP/1.1 {status}", *fields, f"Content-Length: {len(body) if length is None else length}"]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


class Site:
    """A server that answers each path with bytes, some of them slowly."""

    def __init__(self, patience_s: float) -> None:
        self.answers: dict[str, bytes] = {}
        self.addresses = [PUBLIC]
        self.heads: list[str] = []
        self.connected: list[str] = []
        self.pause_s = 0.0
        self.resolved = 0
        hosts = AllowedHosts(["img.example.com", "other.example.com"])
        self.fetcher = Fetcher(hosts, self._resolve, self._connect, patience_s)

    async def fetch(self, url: str = URL, room: int = 1000, tenant: str = "", patience_s: float | None = None) -> bytes:
        until = asyncio.get_running_loop().time() + (patience_s or self.fetcher.patience_s)
        return await self.fetcher.fetch(url, room, until, tenant)

    async def _resolve(self, host: str, port: int) -> list[str]:
        self.resolved += 1
        return self.addresses

    async def _connect(self, address: str, place: CheckedUrl) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        self.connected.append(address)
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.heads.append(head)
            said = self.answers.get(head.split()[1], answer(status="404 Not Found"))
            if self.pause_s:
                for byte in said:
                    writer.write(bytes([byte]))
                    await asyncio.sleep(self.pause_s)
            else:
                writer.write(said)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    @asynccontextmanager
    async def listening(self, tls: ssl.SSLContext | None = None) -> AsyncGenerator[Site]:
        server = await asyncio.start_server(self.serve, "127.0.0.1", 0, ssl=tls)
        self.port: int = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            await server.wait_closed()


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with Site(10).listening() as site:
        yield site


def held(site: Site) -> int:
    return site.fetcher._buffered.total()  # pyright: ignore[reportPrivateUsage]


async def test_an_image_comes_from_the_address_that_was_checked(site: Site) -> None:
    """One resolution, a connection to its address, no credentials; its bytes count until they are released."""
    site.answers["/a.png"] = answer()
    data = await site.fetch()
    assert data == IMAGE and (site.resolved, site.connected) == (1, [PUBLIC])
    assert "Host: img.example.com\r\n" in site.heads[0] and "Authorization" not in site.heads[0]
    assert held(site) == len(IMAGE)
    site.fetcher.release(data)
    assert held(site) == 0


@pytest.mark.parametrize(
    "addresses", [["127.0.0.1"], [PUBLIC, "10.0.0.1"], ["::ffff:169.254.169.254"], ["64:ff9b::7f00:1"], ["::1"], []]
)
async def test_no_connection_to_an_address_that_is_not_public(site: Site, addresses: list[str]) -> None:
    site.addresses = addresses
    with pytest.raises(UrlRefused, match="not all public"):
        await site.fetch()
    assert site.connected == []


async def test_the_systems_own_resolver_is_checked() -> None:
    """`localhost` on the list of hosts is refused by its address."""
    with pytest.raises(UrlRefused, match="not all public"):
        await Fetcher(AllowedHosts(["localhost"])).fetch(
            "http://localhost/", 10, asyncio.get_running_loop().time() + 10
        )


def redirect(to: str, status: str = "302 Found") -> bytes:
    return answer(b"", f"Location: {to}", status=status)


@pytest.mark.parametrize(
    ("to", "why"),
    [
        ("http://evil.net/a.png", "none of --image-hosts"),
        ("http://127.0.0.1/a.png", "none of --image-hosts"),
        ("http://img.example.com:22/a.png", "is on port 22"),
        ("file:///etc/passwd", "no URL that is served"),
        ("/a.png", "more than 3 times"),
        ("", "more than 3 times"),
    ],
)
async def test_a_redirect_elsewhere_is_refused(site: Site, to: str, why: str) -> None:
    site.answers["/a.png"] = redirect(to)
    with pytest.raises(UrlRefused, match=why):
        await site.fetch()
    assert len(site.connected) <= 4 and held(site) == 0


async def test_a_redirect_to_an_allowed_host_is_checked_as_well(site: Site) -> None:
    site.answers |= {"/a.png": redirect("http://other.example.com/b.png", "307 Temporary Redirect"), "/b.png": answer()}
    assert await site.fetch() == IMAGE and site.resolved == 2
    resolve = site.fetcher._resolve  # pyright: ignore[reportPrivateUsage]

    async def other(host: str, port: int) -> list[str]:
        return ["10.0.0.1"] if host == "other.example.com" else await resolve(host, port)

    site.fetcher._resolve = other  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(UrlRefused, match="not all public"):
        await site.fetch()


def chunked(*parts: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in [*parts, b""])


@pytest.mark.parametrize(
    ("said", "error", "why"),
    [
        (answer(length=10**12), Oversized, None),
        (answer(length=10**400), UrlRefused, "HTTP/1.1|could not"),
        (answer(b"x" * 1001), Oversized, None),
        (chunked(*[b"x" * 100] * 11), Oversized, None),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 1001, Oversized, None),
        (answer(length=len(IMAGE) + 5), UrlRefused, "ended the connection early"),
        (chunked(IMAGE)[:-5], UrlRefused, "ended the connection early"),
        (b"", UrlRefused, "ended the connection early"),
        (answer(IMAGE, "Content-Encoding: gzip"), UrlRefused, "compressed"),
        (answer(IMAGE, f"X: {'y' * 200_000}"), UrlRefused, "head of too many bytes"),
        (b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 100_000, UrlRefused, "head of too many bytes|HTTP/1.1"),
        (answer(status="404 Not Found"), UrlRefused, "status 404"),
        (answer(status="101 Switching Protocols"), UrlRefused, "status 101"),
        (b"SSH-2.0-OpenSSH\r\n", UrlRefused, "not answer in HTTP"),
        (chunked(IMAGE).replace(b"chunked", b"chunked\r\nContent-Length: 3"), UrlRefused, "HTTP/1.1"),
    ],
)
async def test_an_answer_that_is_refused(site: Site, said: bytes, error: type[Exception], why: str | None) -> None:
    site.answers["/a.png"] = said
    with pytest.raises(error, match=why):
        await site.fetch()
    assert held(site) == 0


@pytest.mark.parametrize(
    "said",
    [answer(IMAGE + b"more", length=len(IMAGE)), chunked(IMAGE[:4], IMAGE[4:]), b"HTTP/1.1 200 OK\r\n\r\n" + IMAGE],
)
async def test_an_answer_however_it_ends(site: Site, said: bytes) -> None:
    """By a length (what follows is no part of it), by chunks, or with the connection."""
    site.answers["/a.png"] = said
    assert await site.fetch() == IMAGE


async def test_a_slow_server_holds_nobody_else() -> None:
    """A byte at a time: given up after the request's time, while the loop serves others."""
    async with Site(0.3).listening() as site:
        site.answers["/a.png"], site.pause_s = answer(), 0.05
        turns, slow = 0, asyncio.ensure_future(site.fetch())
        while not slow.done():
            await asyncio.sleep(0.01)
            turns += 1
        with pytest.raises(UrlRefused, match=r"have 0\.3 s"):
            await slow
        assert turns > 3 and held(site) == 0


async def hanging(site: Site, tenants: int) -> tuple[list[asyncio.Task[bytes]], asyncio.Event]:
    """160 fetches from a host that takes connections and says nothing, of so many tenants; they end with the event."""
    connect, over = site.fetcher._connect, asyncio.Event()  # pyright: ignore[reportPrivateUsage]

    async def hang(address: str, place: CheckedUrl) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if place.host == "other.example.com":
            await over.wait()
        return await connect(address, place)

    site.fetcher._connect = hang  # pyright: ignore[reportPrivateUsage]
    fetches = [
        asyncio.create_task(site.fetch("http://other.example.com/a.png", tenant=f"slow {number % tenants}"))
        for number in range(160)
    ]
    await asyncio.sleep(0)
    return fetches, over


@pytest.mark.parametrize("tenants", [1, 20])
async def test_a_host_that_hangs_delays_no_other_host(site: Site, tenants: int) -> None:
    """Neither for another tenant nor for the same one; and each of the 160 has its turn once the host answers."""
    site.answers["/a.png"] = answer()
    fetches, over = await hanging(site, tenants)
    async with asyncio.timeout(0.5):
        assert await site.fetch(tenant="good") == IMAGE
        assert await site.fetch(tenant="slow 0") == IMAGE
    over.set()
    assert await asyncio.gather(*fetches) == [IMAGE] * 160


async def test_without_shares_a_host_that_hangs_delays_all(site: Site) -> None:
    """The control: with places for all of the process alone, a good fetch waits until its time is over."""
    site.answers["/a.png"] = answer()
    site.fetcher._places = FetchPlaces(32, 32, 32, 32)  # pyright: ignore[reportPrivateUsage]
    fetches, over = await hanging(site, 1)
    with pytest.raises(UrlRefused, match="all images of a request have"):
        await site.fetch(tenant="good", patience_s=0.2)
    over.set()
    assert await asyncio.gather(*fetches) == [IMAGE] * 160


async def test_a_name_that_hangs_takes_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that wait for it share a lookup, and another name is looked up meanwhile."""
    over, lookups = threading.Event(), list[str]()

    def getaddrinfo(host: str, port: int, **options: object) -> list[tuple[object, ...]]:
        lookups.append(host)
        if host == "slow.example.com":
            over.wait(30)
        return [(0, 0, 0, "", (PUBLIC, port))]

    monkeypatch.setattr(fetching.socket, "getaddrinfo", getaddrinfo)
    resolver = fetching.Resolver(2)
    slow = [asyncio.create_task(resolver.resolve("slow.example.com", 80)) for _ in range(20)]
    await asyncio.sleep(0)
    slow[0].cancel()
    try:
        assert await resolver.resolve("fast.example.com", 80) == [PUBLIC]
    finally:
        over.set()
    assert await asyncio.gather(*slow[1:]) == [[PUBLIC]] * 19
    assert sorted(lookups) == ["fast.example.com", "slow.example.com"]


async def test_one_tenant_does_not_fill_the_memory_of_all(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "TENANT_BYTES", len(IMAGE))
    site.answers["/a.png"] = answer()
    first = await site.fetch(tenant="full")
    with pytest.raises(fetching.TooManyBodies, match="of this tenant"):
        await site.fetch(tenant="full")
    assert await site.fetch(tenant="other") == IMAGE
    site.fetcher.release(first, "full")
    assert await site.fetch(tenant="full") == IMAGE


async def test_memory_of_all_is_bounded(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "BUFFERED_BYTES", 20)
    site.answers["/a.png"] = answer()
    first = await site.fetch()
    with pytest.raises(fetching.TooManyBodies, match="as many images"):
        await site.fetch()
    site.fetcher.release(first)
    assert await site.fetch() == IMAGE


class SecureSite(Site):
    """The same over TLS: the production's handshake, with an authority of the test."""

    def __init__(self, trusted: ssl.SSLContext) -> None:
        super().__init__(10)
        self._trusted = trusted

    async def _connect(self, address: str, place: CheckedUrl) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        self.connected.append(address)
        return await Connector(self._trusted).connect("127.0.0.1", replace(place, port=self.port))


@pytest.mark.parametrize(
    ("host", "days", "trusted", "taken"),
    [
        ("img.example.com", 30, True, True),
        ("other.example.com", 30, True, False),
        ("127.0.0.1", 30, True, False),
        (PUBLIC, 30, True, False),
        ("img.example.com", -1, True, False),
        ("img.example.com", 30, False, False),
    ],
)
async def test_a_certificate_is_for_the_name(host: str, days: int, trusted: bool, taken: bool, tmp_path: Path) -> None:
    """The connection goes to an address, and the certificate has to be the host's, in force, and of a trusted
    authority; nothing is sent before that."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority = certificate(tmp_path, days, host)
    server.load_cert_chain(authority, tmp_path / "key.pem")
    site = SecureSite(ssl.create_default_context(cafile=str(authority) if trusted else None))
    site.answers["/a.png"] = answer()
    async with site.listening(server):
        if taken:
            assert await site.fetch("https://img.example.com/a.png") == IMAGE
            assert "Host: img.example.com\r\n" in site.heads[0]
        else:
            with pytest.raises(UrlRefused, match="could not be fetched: TLS failed"):
                await site.fetch("https://img.example.com/a.png")
            assert not site.heads
        assert site.connected == [PUBLIC]


async def test_the_loader_names_the_part(site: Site) -> None:
    """A fetched image is decoded as any other, and its bytes are released."""
    image_input = ImageInput(
        kind="grid", token=9, placeholder="<i>", unit=8, least_pixels=64, most_pixels=1536, resample=3
    )
    loader = ImageLoader(fetcher=site.fetcher)
    site.answers["/a.png"] = answer()
    try:
        for url, why in ((URL, "none that can be read"), ("https://evil.net/a", "--image-hosts")):
            with pytest.raises(RequestError, match=why) as refused:
                await loader.load([ImageSource(url, "here")], image_input, 100, RequestImages())
            assert refused.value.param == "here" and held(site) == 0
    finally:
        await loader.stop()
