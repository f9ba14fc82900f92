"""Which URLs images may come from, and which addresses are connected to."""

from __future__ import annotations

import pytest

from api.images.hosts import Hosts, UrlRefused, is_public

HOSTS = Hosts(["img.example.com", "CDN.example.com:8443"])


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0"),
        *("255.255.255.255", "224.0.0.1", "240.0.0.1", "192.0.2.1", "198.18.0.1", "168.63.129.16", "192.88.99.1"),
        *("::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "fd00:ec2::254", "fec0::1", "ff02::1", "2001:db8::1"),
        *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:a9fe:a9fe", "::127.0.0.1", "::10.0.0.1"),
        *("2002:7f00:1::", "2002:a9fe:a9fe::1", "2002:c0a8:101::", "2001:0:4136:e378:8000:63bf:3fff:fdd2"),
        *("64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::1", "100::1", "4000::1", "localhost", "1", ""),
    ],
)
def test_an_address_that_is_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize(
    "address", ["93.184.216.34", "1.1.1.1", "2606:4700::1111", "::ffff:1.1.1.1", "64:ff9b::101:101", "2002:101:101::1"]
)
def test_an_address_that_is_public(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("https://img.example.com.evil.net/a", "none of --image-hosts"),
        ("https://evil.net/img.example.com", "none of --image-hosts"),
        ("https://www.img.example.com/a", "none of --image-hosts"),
        ("https://img.example.com./a", "none of --image-hosts"),
        ("https://127.0.0.1/a", "none of --image-hosts"),
        ("https://[::1]/a", "none of --image-hosts"),
        ("https://evil.net\\.img.example.com/a", "none of --image-hosts"),
        ("https://evil.net#@img.example.com/a", "none of --image-hosts"),
        ("https://user:secret@img.example.com/a", "a user or a password"),
        ("https://evil.net@img.example.com/a", "a user or a password"),
        ("https://img.example.com@evil.net/a", "a user or a password"),
        ("https://img.example.com:22/a", "is on port 22"),
        ("https://img.example.com:8443/a", "is on port 8443"),
        ("https://img.example.com:0x50/a", "is on port 0x50"),
        ("https://img.example.com:²/a", "is on port ²"),
        ("https://cdn.example.com/a", "allows 8443"),
        ("ftp://img.example.com/a", "no URL that is served"),
        ("file:///etc/passwd", "no URL that is served"),
        ("https://img.example.com/a b", "no URL that is served"),
        ("https://img.example.com/\r\nX: y", "no URL that is served"),
        ("https://img.exämple.com/", "none of --image-hosts"),
        ("https://img.example.com/" + "a" * 9000, "no URL that is served"),
        ("//img.example.com/a", "no URL that is served"),
    ],
)
def test_a_url_that_is_not_fetched(url: str, why: str) -> None:
    with pytest.raises(UrlRefused, match=why):
        HOSTS.place(url)


def test_a_url_of_a_named_host() -> None:
    place = HOSTS.place("HTTPS://IMG.example.com?size=2#part")
    assert (place.scheme, place.authority, place.port, place.target) == ("https", "img.example.com", 443, "/?size=2")
    assert HOSTS.place("http://img.example.com/a").port == 80
    assert HOSTS.place("https://cdn.example.com:8443/a/b").authority == "cdn.example.com:8443"


@pytest.mark.parametrize(
    "entry", ["https://a.b", "a.b/c", "*.a.b", "a.b:0", "a.b:70000", "", "user@a.b", "::1", "a..b"]
)
def test_an_entry_that_is_no_host(entry: str) -> None:
    with pytest.raises(ValueError, match="is no host"):
        Hosts([entry])
