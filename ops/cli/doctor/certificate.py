"""The certificate of a server: its validity, the days that are left, and the trust of this host in it."""

from __future__ import annotations

import socket
import ssl
from datetime import UTC, datetime, timedelta

from cryptography import x509

from control.operations.checks.findings import Checks

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
    ends, begins = certificate.not_valid_after_utc, certificate.not_valid_before_utc
    left = ends - now
    renew = "Renew the certificate of the server, and restart or reload the server."
    if left < timedelta(0):
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
    elif left < SOON:
        checks.warning("certificate", f"it expires on {ends:%Y-%m-%d}, in {left.days} days", renew)
    else:
        checks.ok("certificate", f"valid for {left.days} days")


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
