"""A TLS front before a server's unix socket, with a certificate of any age."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Generator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


def certificate(folder: Path, days: int, host: str = "localhost") -> Path:
    """A certificate for a host that ends in `days` days, in `folder`; its file is its own authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host)])
    now = datetime.now(UTC)
    built = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=30))
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    (folder / "key.pem").write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    (folder / "certificate.pem").write_bytes(built.public_bytes(pem))
    return folder / "certificate.pem"


@contextmanager
def tls_front(behind: Path, folder: Path) -> Generator[int]:
    """The port of a front that shows the certificate in `folder`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "certificate.pem", folder / "key.pem")
    listener = socket.create_server(("localhost", 0))
    threading.Thread(target=_accept, args=(listener, context, behind), daemon=True).start()
    try:
        yield listener.getsockname()[1]
    finally:
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def _accept(listener: socket.socket, context: ssl.SSLContext, behind: Path) -> None:
    while True:
        try:
            plain, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=_serve, args=(plain, context, behind), daemon=True).start()


def _serve(plain: socket.socket, context: ssl.SSLContext, behind: Path) -> None:
    """Pass bytes both ways until either side closes."""
    with (
        plain,
        contextlib.suppress(OSError),
        context.wrap_socket(plain, server_side=True) as front,
        socket.socket(socket.AF_UNIX) as server,
    ):
        server.connect(str(behind))
        back = threading.Thread(target=_pass_on, args=(server, front), daemon=True)
        back.start()
        _pass_on(front, server)
        back.join()


def _pass_on(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_RDWR)
