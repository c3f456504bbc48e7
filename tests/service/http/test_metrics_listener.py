"""Metrics have a port of their own: what devices can reach does not show them."""

import pytest
from click.testing import CliRunner

from keyhole.cli.serve import serve
from keyhole.service.limits import Limits
from keyhole.service.routes import MetricsApp
from keyhole.service.transport import serving
from tests.service.in_process import Service
from tests.service.service_process import service
from tests.service.small_rounds import published
from tests.service.sockets import app_with, get, metric


def test_the_port_of_devices_shows_no_metrics():
    assert Service().ask("GET", "/metrics").status_code == 404


def test_the_listener_of_metrics_shows_nothing_else_and_counts_nothing():
    app = app_with()
    with serving(app) as url, serving(MetricsApp(app.metrics, Limits())) as shown:
        assert get(url + "/healthz").status_code == 200
        for _ in range(2):
            page = get(shown + "/metrics").text
            assert 'keyhole_requests_total{route="health",status="200"} 1.0' in page
        assert 'route="metrics"' not in page
        for path in ("/healthz", "/v1/rounds/current", "/v1/checkin"):
            assert get(shown + path).status_code == 404


def test_a_service_listens_for_metrics_on_this_machine_alone(tmp_path):
    published(tmp_path)
    with service(tmp_path) as running:
        assert running.metrics.startswith("http://127.0.0.1:")
        assert running.metrics.partition("/metrics")[0] != running.url
        get(running.url + "/v1/rounds/current")
        assert metric(running.metrics, "keyhole_requests_in_flight") == 0
        assert get(running.url + "/metrics").status_code == 404


@pytest.mark.parametrize("text", ["9100", ":9100", "x:y", "127.0.0.1:70000"])
def test_an_address_that_is_none_is_refused(text, tmp_path):
    done = CliRunner().invoke(serve, [str(tmp_path), "--metrics-listen", text])
    assert done.exit_code == 2
    assert "is not HOST:PORT" in done.output
