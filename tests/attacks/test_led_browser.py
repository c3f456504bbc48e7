"""Attack: a web page whose name was pointed at 127.0.0.1 reads what its visitor's machine serves.

A browser takes such a page for the site that it came from, and lets it read the answers; what tells
it apart is the name that it asks under. The planted hole is a page that does not look at the name.
"""

import httpx
import pytest

from keyhole.experiments.watch import app as watch
from keyhole.service import routes
from keyhole.service.limits import Limits
from keyhole.service.metrics import Metrics
from keyhole.service.routes import MetricsApp
from keyhole.service.transport import serving
from tests.experiments.watch.watched import make_folder, watching
from tests.helpers import LONG

NAMED = {"evil.example": 401, "localhost.evil.example": 401, "[": 401, "": 401}
NAMED |= {"127.0.0.1.evil.example:80": 401, "evil.example@localhost:": 200}  # no browser sends it
OWN = {"localhost": 200, "LOCALHOST:9": 200, "127.0.0.1:9": 200, "[::1]:9": 200, "10.0.0.5": 200}


@pytest.fixture(params=["page", "metrics"])
def url(request, tmp_path):
    """What may be led to: the page of `keyhole watch`, the metrics of a service."""
    if request.param == "page":
        with watching(make_folder(tmp_path)) as url:
            yield f"{url}/api/overview"
    else:
        with serving(MetricsApp(Metrics(), Limits()), prepare=lambda: None) as url:
            yield f"{url}/metrics"


def status(url, host):
    return httpx.get(url, headers={"host": host}, timeout=LONG).status_code


def test_a_site_that_leads_a_browser_here_reads_nothing(url):
    assert {host: status(url, host) for host in NAMED} == NAMED


def test_who_asks_by_an_address_is_answered(url):
    assert {host: status(url, host) for host in OWN} == OWN


def test_what_is_read_is_not_shared_with_other_sites(url):
    got = httpx.get(url, headers={"origin": "http://evil.example"}, timeout=LONG)
    assert not [name for name in got.headers if name.startswith("access-control")]


def test_where_nobody_looks_at_the_name_the_attack_succeeds(url, monkeypatch):
    for module in (watch, routes):
        monkeypatch.setattr(module, "refuse_led_here", lambda *_: None)
    assert status(url, "evil.example") == 200
