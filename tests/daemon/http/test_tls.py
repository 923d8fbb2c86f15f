"""The HTTP API over TLS, with a certificate made here."""

import http.client
import shutil
import ssl
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from tests.support.http_daemon import HttpDaemon, ask

from kvdepot.errors import ConfigError

TOKEN = "0123456789abcdef"
needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")


def made(folder: Path, name: str) -> tuple[Path, Path]:
    """A new certificate for 127.0.0.1, and its key."""
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"),
            *("-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)),
        ],
        check=True,
        capture_output=True,
    )
    return cert, key


def status(url: str, trusting: Path, path: str, token: str = "") -> int:
    """What a client answers that trusts this certificate alone."""
    context = ssl.create_default_context(cafile=str(trusting))
    at = urlsplit(url)
    connection = http.client.HTTPSConnection(
        at.hostname or "", at.port, timeout=60, context=context
    )
    try:
        connection.request("GET", path, headers={"authorization": f"Bearer {token}"})
        return connection.getresponse().status
    finally:
        connection.close()


@needs_openssl
def test_the_api_over_tls(tmp_path: Path) -> None:
    cert, key = made(tmp_path, "mine")
    other, _ = made(tmp_path, "other")
    with HttpDaemon(tmp_path, TOKEN, (cert, key)) as daemon:
        assert daemon.url.startswith("https://")
        assert status(daemon.url, cert, "/healthz") == 200
        assert status(daemon.url, cert, "/api/stats", TOKEN) == 200
        assert status(daemon.url, cert, "/api/stats", "another token") == 401
        with pytest.raises(ssl.SSLCertVerificationError):
            status(daemon.url, other, "/healthz")
        with pytest.raises((http.client.HTTPException, ConnectionError)):
            ask(daemon.url, "GET", "/healthz")  # in the clear
        assert status(daemon.url, cert, "/healthz") == 200, "they cost the others nothing"


@needs_openssl
def test_a_certificate_with_another_key_is_one_error(tmp_path: Path) -> None:
    (cert, _), (_, key) = made(tmp_path, "mine"), made(tmp_path, "other")
    with pytest.raises(ConfigError, match="--http-cert: cannot be used") as caught:
        HttpDaemon(tmp_path, TOKEN, (cert, key))
    assert "PRIVATE" not in str(caught.value)
