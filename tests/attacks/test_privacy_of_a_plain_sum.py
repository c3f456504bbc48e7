"""An operator writes a Flower config by hand that promises privacy for updates in the clear.

Options of `keyhole train` and `keyhole flower app` never make one. Records of such a run would name
an epsilon while the service and the trainer read every update: the server refuses it before a round
is published and a node is called.
"""

import pytest

pytest.importorskip("flwr")
pytest.importorskip("dp_accounting")

from flwr.app import Context, RecordDict
from flwr.common.config import get_fused_config_from_dir

from keyhole.engines.flower.tasks import server_app
from keyhole.errors import CohortError, InputError
from keyhole.service.inbox import SpoolInbox
from tests.engines.flower.in_process_grid import InProcessGrid

PROJECT = """\
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "by-hand"
version = "1.0.0"
license = "Apache-2.0"

[tool.flwr.app]
publisher = "somebody"

[tool.flwr.app.components]
serverapp = "by_hand.server:app"
clientapp = "by_hand.client:app"

[tool.flwr.app.config]
run = "{folder}/run"
rounds-directory = "{folder}/rounds"
service = "http://127.0.0.1:1"
node-seconds = 0.2
spec.version = 6
spec.task = "so_tag"
spec.data = "synthetic"
spec.rounds = 1
spec.cohort.size = 3
spec.sizes.words = 100
spec.sizes.tags = 5
spec.keys.word.count = 10
"""
PRIVACY = "spec.privacy.noise = 1.0\nspec.privacy.clip = 1.0\nspec.privacy.delta = 1e-3\n"
NAMED = '{}spec.aggregation.name = "{}"\n'


@pytest.fixture(autouse=True)
def threads(monkeypatch):
    """JAX of this process has begun, with as many threads as it has."""
    monkeypatch.setattr("keyhole.rounds.cores.use_one_thread", lambda: None)


def run_by_hand(folder, more):
    """What a ServerApp does with a project that nobody but Flower has read."""
    (folder / "pyproject.toml").write_text(PROJECT.format(folder=folder) + more)
    grid = InProcessGrid({})
    context = Context(1, 0, {}, RecordDict(), get_fused_config_from_dir(folder, {}))
    try:
        server_app(grid, context)
    finally:
        assert grid.pushed == []


@pytest.mark.parametrize("name", ["", "plain"])
def test_a_plain_sum_with_privacy_is_refused_from_a_config_written_by_hand(tmp_path, name):
    with pytest.raises(InputError, match="arrives in the clear: got privacy with"):
        run_by_hand(tmp_path, NAMED.format(PRIVACY, name) if name else PRIVACY)
    assert not (tmp_path / "rounds" / "current.json").exists()


def test_the_same_config_without_privacy_goes_on_to_wait_for_nodes(tmp_path):
    with pytest.raises(CohortError, match="too few nodes"):
        run_by_hand(tmp_path, "")
    assert (tmp_path / "rounds" / "current.json").exists()


def test_an_inbox_that_does_not_look_publishes_the_promise(tmp_path, monkeypatch):
    """The hole."""

    def open_all(inbox, t, asked, layout, parts, name, purpose):
        inbox._round, inbox._name = (t, layout, parts), name
        return {}

    monkeypatch.setattr(SpoolInbox, "open", open_all)
    with pytest.raises(CohortError, match="too few nodes"):
        run_by_hand(tmp_path, PRIVACY)
    assert (tmp_path / "rounds" / "current.json").exists()
