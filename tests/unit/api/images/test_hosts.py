"""Allowed URLs and addresses of images."""

from __future__ import annotations

import ipaddress

import pytest

from api.images.hosts import AllowedHosts, UrlRefused, is_public

HOSTS = AllowedHosts(["img.example.com", "CDN.example.com:8443"])


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


SPECIAL = (
    # https://www.iana.org/assignments/iana-ipv4-special-registry, and multicast
    *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24"),
    *("192.0.0.0/29", "192.0.0.8/32", "192.0.0.9/32", "192.0.0.10/32", "192.0.0.170/31", "192.0.0.192/32"),
    *("192.0.2.0/24", "192.31.196.0/24", "192.52.193.0/24", "192.88.99.0/24", "192.168.0.0/16", "192.175.48.0/24"),
    *("198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4", "255.255.255.255/32"),
    # https://www.iana.org/assignments/iana-ipv6-special-registry, and site-local, IPv4-compatible, multicast
    *("::1/128", "::/128", "::/96", "64:ff9b:1::/48", "100::/64", "100:0:0:1::/64", "2001::/23", "2001::/32"),
    *("2001:1::1/128", "2001:1::2/128", "2001:1::3/128", "2001:2::/48", "2001:3::/32", "2001:4:112::/48"),
    *("2001:10::/28", "2001:20::/28", "2001:30::/28", "2001:db8::/32", "2620:4f:8000::/48", "3fff::/20", "5f00::/16"),
    *("fc00::/7", "fe80::/10", "fec0::/10", "ff00::/8", "4000::/3", "::ffff:0:0:0/96"),
)


@pytest.mark.parametrize("block", SPECIAL)
def test_no_address_of_a_special_purpose_block_is_public(block: str) -> None:
    """Nor one of IPv6 that leads to one of IPv4 there: mapped, translated (NAT64) or by 6to4."""
    network = ipaddress.ip_network(block)
    for address in (network[0], network[-1]):
        assert not is_public(str(address))
        if isinstance(address, ipaddress.IPv4Address):
            number = int(address)
            for inner in ((0xFFFF << 32) + number, (0x64FF9B << 96) + number, (0x2002 << 112) + (number << 80) + 1):
                assert not is_public(str(ipaddress.IPv6Address(inner)))


@pytest.mark.parametrize(
    "address",
    [
        *("1.0.0.0", "9.255.255.255", "11.0.0.0", "100.63.255.255", "100.128.0.0", "126.255.255.255", "128.0.0.0"),
        *("169.253.255.255", "172.15.255.255", "172.32.0.0", "191.255.255.255", "192.0.1.0", "192.0.3.0"),
        *("192.167.255.255", "192.169.0.0", "198.17.255.255", "198.20.0.0", "203.0.112.255", "203.0.114.0"),
        *("223.255.255.255", "168.63.129.15", "2000::", "2001:200::", "2001:db7:ffff::", "2001:db9::", "3ffe::1"),
    ],
)
def test_the_neighbours_of_special_purpose_blocks_are_public(address: str) -> None:
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
        HOSTS.checked(url)


def test_a_url_of_a_named_host() -> None:
    place = HOSTS.checked("HTTPS://IMG.example.com?size=2#part")
    assert (place.scheme, place.authority, place.port, place.target) == ("https", "img.example.com", 443, "/?size=2")
    assert HOSTS.checked("http://img.example.com/a").port == 80
    assert HOSTS.checked("https://cdn.example.com:8443/a/b").authority == "cdn.example.com:8443"


@pytest.mark.parametrize(
    "entry", ["https://a.b", "a.b/c", "*.a.b", "a.b:0", "a.b:70000", "", "user@a.b", "::1", "a..b"]
)
def test_an_entry_that_is_no_host(entry: str) -> None:
    with pytest.raises(ValueError, match="is no host"):
        AllowedHosts([entry])
