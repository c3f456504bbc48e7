"""Where a service is: what is no URL of one, and certificates."""

import pytest

from keyhole.errors import InputError, ServiceError
from keyhole.wire.http import HttpClient
from keyhole.wire.sockets import Certificate
from tests.service.small_service import small_service


@pytest.mark.parametrize(
    "url",
    [
        "",
        "example.org",
        "ftp://example.org",
        "https://",
        "https://h:x",
        "https://h:99999",
        "https://h/?q=1",
        "https://user:word@h",
        "http://[::1",
        "https://a..b",
        f"https://{'a' * 64}.org",
        "https://a b",
        "https://h/a b",
        "https://h/\N{LATIN SMALL LETTER U WITH DIAERESIS}",
    ],
)
def test_what_is_no_url_of_a_service_is_refused(url):
    with pytest.raises(InputError, match="not the URL"):
        HttpClient(url)


def test_plain_http_stays_on_this_machine_unless_told():
    for url in ("http://127.0.0.1:80", "http://localhost", "http://[::1]:8"):
        HttpClient(url)
    with pytest.raises(InputError, match=r"in the clear.*pass --insecure"):
        HttpClient("http://192.0.2.1")
    HttpClient("http://192.0.2.1", insecure=True)


def test_certificates_that_cannot_be_read_are_named(tmp_path):
    (tmp_path / "ca.pem").write_text("no certificate")
    with pytest.raises(InputError, match="certificate cannot be read"):
        HttpClient("https://h", ca=tmp_path / "ca.pem")
    with pytest.raises(InputError, match="certificate cannot be read"):
        HttpClient("https://h", certificate=Certificate(tmp_path / "a", tmp_path / "b"))


def test_plain_http_at_an_https_address_is_said_at_once(tmp_path):
    with small_service(tmp_path) as service:
        client = HttpClient(service.url.replace("http:", "https:"))
        with pytest.raises(ServiceError, match="does not speak TLS: got an answer in plain http"):
            client.get("/v1/rounds/current", limit=1 << 10)
