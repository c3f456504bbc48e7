"""The page over HTTP: what is answered, to whom, and what is not."""

import httpx
import pytest

from keyhole.errors import ServiceError
from keyhole.experiments.watch.address import ServiceWatch
from keyhole.experiments.watch.app import WatchApp
from keyhole.service.routes import MetricsApp
from keyhole.service.status import RunsFiles
from keyhole.service.telling import gauges_of
from keyhole.service.transport import serving
from tests.experiments.watch.watched import make_folder, watching
from tests.helpers import LONG
from tests.service.small_service import small_service


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    with watching(make_folder(tmp_path_factory.mktemp("watched"))) as url:
        yield url


def get(url, **options):
    return httpx.get(url, timeout=LONG, **options)


def test_the_page_needs_no_other_host_and_may_ask_none(url):
    page, script = get(f"{url}/"), get(f"{url}/watch.js")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert page.headers["x-content-type-options"] == "nosniff"
    for text in (page.text, script.text):
        assert "https://" not in text
        assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "innerHTML" not in script.text


def test_what_has_not_changed_is_not_sent_again(url):
    first = get(f"{url}/api/run", params={"name": "emnist-top4"})
    assert first.json()["rounds"] == 6
    again = get(
        f"{url}/api/run",
        params={"name": "emnist-top4"},
        headers={"if-none-match": first.headers["etag"]},
    )
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize(
    "path",
    ["/../pyproject.toml", "/api/run?name=../x", "/api", "/rounds/current.json", "/%2e%2e/x"],
)
def test_nothing_else_is_given_out(url, path):
    assert get(url + path).status_code == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_nothing_can_be_changed(url, method):
    assert httpx.request(method, f"{url}/api/overview", timeout=LONG).status_code == 405


@pytest.mark.parametrize("path", ["/", "/watch.js", "/api/overview", "/api/run?name=emnist-top4"])
def test_another_site_that_leads_a_browser_here_is_refused(url, path):
    assert get(url + path, headers={"host": "evil.example"}).status_code == 401
    assert get(url + path, headers={"host": "localhost:1"}).status_code == 200


def test_a_service_is_watched_by_its_metrics_or_by_its_own_address(tmp_path):
    with small_service(tmp_path) as service:
        service.publish(cohort=["device-1", "device-2"])
        metrics = service.app.metrics
        metrics.show(lambda: gauges_of(RunsFiles(tmp_path), lambda: 1e10))
        with serving(MetricsApp(metrics, service.app.limits), prepare=lambda: None) as page:
            by_metrics = ServiceWatch(f"{page}/metrics")
            found = by_metrics.statuses()[""]
            assert (found.number, found.phase, found.cohort, found.updates) == (0, "open", 2, 0)
            assert found.told == "round 0: 0 of 2 updates, 2 devices to come"
            service.publisher.close_round()
            assert by_metrics.overview()["rounds"][0]["phase"] == "closed"
            service.publish()
            told = by_metrics.overview()
        assert [seen["number"] for seen in told["seen"]] == [0, 1]
        known = ServiceWatch(service.url).statuses()[""]
        assert (known.number, known.updates, known.cohort) == (1, None, None)
        assert known.told == "round 1 is open; its counts are at the metrics' address"
    with pytest.raises(ServiceError, match="no status at"):
        ServiceWatch(service.url).statuses()
    assert "no status at" in ServiceWatch(service.url).overview()["troubles"][0]


def test_a_service_has_no_runs(tmp_path):
    with small_service(tmp_path) as service:
        watched = ServiceWatch(service.url)
        with serving(WatchApp(watched, None), prepare=lambda: None) as url:
            assert get(f"{url}/api/run?name=x").status_code == 404
            assert get(f"{url}/api/overview").json()["runs"] == []
