"""keyhole.toml: what it may say, and what is said where it cannot be used."""

import subprocess
import sys

import pytest

from keyhole.errors import InputError
from keyhole.project.forecast import forecast_of
from keyhole.project.new import write_project
from keyhole.project.parties import check_parties, simulating_args
from keyhole.project.spec import FILE, Project

PRIVATE = """
second = "http://127.0.0.1:8200"
aggregators = ["http://127.0.0.1:8110", "http://127.0.0.1:8210"]
"""


@pytest.fixture
def folder(tmp_path):
    write_project(tmp_path / "films")
    return tmp_path / "films"


def changed(folder, old, new):
    text = (folder / FILE).read_text()
    assert old in text
    (folder / FILE).write_text(text.replace(old, new))
    return Project.open(folder)


def private(folder):
    """The project with two operators."""
    changed(folder, 'task = "task:TASK"', 'task = "task:TASK"\ndelivery = "pir"')
    return changed(folder, "devices = 3", f"devices = 3\n{PRIVATE}")


def test_a_new_project_says_what_each_party_learns_and_what_a_round_costs(folder):
    project = Project.open(folder)
    with project.importable():
        told = forecast_of(project)
    assert list(told.learned) == ["service", "trainer", "mirrors and CDNs"]
    assert told.learned["service"]["keys"] == "keys and whose they are"
    clear = "each update, its keys and whose they are"
    assert [seen["updates"] for seen in told.learned.values()] == [clear, clear, "nothing"]
    assert (told.rounds, told.cohort) == (20, 3)
    whole = told.costs["no select: the whole model"]
    numbers = 2000 * 16 + 16
    assert (whole.bytes_down, whole.bytes_up) == (4 * numbers, 4 * numbers)
    assert told.parameter_bytes == 2 * 4 * (20 * 16 + 16)
    assert told.parameter_bytes < told.select_bytes < told.broadcast_bytes / 20
    assert told.notes == []


def test_select_that_costs_more_than_broadcast_is_said_plainly(folder):
    """Forty films of one number each: a key and its proof are longer than what they are for."""
    source = (folder / "task.py").read_text()
    (folder / "task.py").write_text(
        source.replace("FILMS, WIDTH = 2000, 16", "FILMS, WIDTH = 40, 1")
    )
    shown = subprocess.run(
        [sys.executable, "-c", "from keyhole.cli.main import main; main()", "check"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    (note,) = [line for line in shown.splitlines() if line.startswith("note: select costs ")]
    times, why = note.removeprefix("note: select costs ").split(" times broadcast here: ")
    assert float(times) > 1
    assert "because 168 B of parameters come with" in why  # twice 21 numbers
    assert shown.rstrip().endswith("see the notes")


def test_a_private_project_tells_of_its_parties_its_price_and_what_a_try_out_is_not(folder):
    project = private(folder)
    with project.importable():
        told = forecast_of(project)
    parties = ["service", "second", "aggregator-0", "aggregator-1", "trainer"]
    assert list(told.learned) == parties
    seen = [told.learned[party]["keys"] for party in parties]
    assert seen == ["who takes part"] * 2 + ["nothing"] * 3
    assert "how many chose each key" in told.learned["trainer"]["updates"]  # means over choosers
    assert any("a try-out, not a protection" in note for note in told.notes)


def check(folder, old, new):
    project = changed(folder, old, new)
    with project.importable():
        forecast_of(project)


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("service =", "servce =", "did you mean service?"),
        ("rounds = 20", "ronds = 20", "did you mean rounds?"),
        ("rounds = 20", "rounds = 0", "rounds of keyhole.toml is out of range: got 0; expected a"),
        ("rounds = 20", 'rounds = "20"', "rounds of keyhole.toml is not a whole number: got '20'"),
        ("rounds = 20", "rounds = 20\nclient.lr = [1]", "expected TOML"),
        ("size = 3", "size = [3, 4]", r"cohort.size of keyhole.toml is not a whole number"),
        ("count = 20", "cuont = 20", "did you mean keys.film.count?"),
        ("count = 20", 'count = "x"', "keys.film.count of keyhole.toml is not a whole number: got"),
        ("count = 20", "count = 0", "keys.film.count of keyhole.toml is out of range: got 0; "),
        ("[keys.film]", "[keys.flim]", "got flim; expected film"),
        ("lr = 0.2\n", "lr = 0.2\n[best]\nmetrik = 'error'\n", "did you mean best.metric?"),
        ('"choosers"', '"chooser"', "did you mean choosers?"),
        ("rounds = 20", "rounds = 20\nserver = 1", "server of keyhole.toml is a table: got one"),
        ('"http://127.0.0.1:8100"', '"http://one.example"', "write https"),
        ('"http://127.0.0.1:8100"', '"one.example"', "not the address of a service"),
        ("devices = 3", "devices = -1", "devices"),
        ("devices = 3", 'aggregators = ["http://127.0.0.1:8110"]', "two aggregators"),
        ("devices = 3", 'second = "http://127.0.0.1:8100"', "one address"),
        ("devices = 3", 'pages = ["*"]', "not the origin of a page"),
        ("devices = 3", 'second = "http://127.0.0.1:8200"', "nobody asks second"),
        ('task = "task:TASK"', 'task = "task:TASK"\ndelivery = "pir"', "needs a second"),
        ('task = "task:TASK"', 'task = "task:TASK"\ndelivery = "relay"', "deploys no relay"),
        ('task = "task:TASK"', "", "names no task"),
        ("rounds = 20", "rounds =", "expected TOML"),
    ],
)
def test_a_mistake_in_the_file_is_one_line_that_names_it(folder, old, new, named):
    with pytest.raises(InputError, match=named) as caught:
        check(folder, old, new)
    assert "\n" not in str(caught.value)


def test_a_sum_is_named_as_a_delivery_is(folder):
    project = changed(folder, "rounds = 20", 'rounds = 20\naggregation = "secure-sparse"')
    with project.importable():
        spec = project.spec
    assert (spec.aggregation.name.name, spec.aggregation.ring_bits) == ("secure-sparse", 32)


def test_a_try_out_with_too_few_devices_is_told_of(folder):
    project = changed(folder, "devices = 3", "devices = 2")
    with project.importable():
        (note,) = forecast_of(project).notes
    assert "rounds wait for 3 devices, and a try-out has 2" in note


def test_a_try_out_whose_evaluations_want_too_many_devices_is_told_of(folder):
    changed(folder, "devices = 3", "devices = 8")
    project = changed(folder, "[cohort]\n", '[cohort]\nsampling = "check-in"\nevaluators = 9\n')
    with project.importable():
        (note,) = forecast_of(project).notes
    assert "evaluations wait for 9 devices, and a try-out has 8" in note
    assert "lower cohort.evaluators" in note


def test_a_service_elsewhere_needs_a_folder_from_the_root(folder):
    project = changed(folder, '"http://127.0.0.1:8100"', '"https://one.example"')
    with pytest.raises(InputError, match="such as /srv/keyhole"):
        check_parties(project)


def test_a_second_operator_elsewhere_needs_a_store(folder):
    project = changed(folder, 'task = "task:TASK"', 'task = "task:TASK"\ndelivery = "pir"')
    project = changed(folder, "devices = 3", 'rounds = "/srv"\nsecond = "https://two.example"')
    with pytest.raises(InputError, match="no way to the rounds"):
        check_parties(project)


def test_a_new_project_overwrites_nothing(folder):
    with pytest.raises(InputError, match="not empty"):
        write_project(folder)


@pytest.mark.parametrize("told", ["evaluators = 2", 'sampling = "check-in"', "rest = 2"])
def test_fields_for_devices_that_check_in_are_left_out_where_none_does(folder, told):
    project = changed(folder, "size = 3", f"size = 3\n{told}")
    with project.importable():
        assert forecast_of(project).notes == []
        assert project.spec.cohort.sampling == "check-in"
    here = simulating_args(project)
    name = told.partition(" = ")[0]
    assert here == [f"--{name}", "fixed" if name == "sampling" else "0"]


def test_a_project_may_train_though_select_costs_more(folder):
    """A module of another test's project has the same name: hence processes."""
    source = (folder / "task.py").read_text()
    (folder / "task.py").write_text(
        source.replace("FILMS, WIDTH = 2000, 16", "FILMS, WIDTH = 800, 3")
    )
    private(folder)

    def notes():
        shown = subprocess.run(
            [sys.executable, "-c", "from keyhole.cli.main import main; main()", "check"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        return [line for line in shown.splitlines() if "the whole model" in line]

    wants = "note: `keyhole run` wants force = true in [deploy]: pir sends more"
    assert any(each.startswith(wants) for each in notes())
    changed(folder, "devices = 3", "devices = 3\nforce = true")
    assert any(each.startswith("note: pir sends more") for each in notes())


def test_a_store_without_its_package_is_told_of(folder, monkeypatch):
    monkeypatch.setattr("keyhole.project.forecast.find_spec", lambda name: None)
    private(folder)
    project = changed(folder, "devices = 3", 'devices = 3\nstore = "file:///srv/rounds"')
    with project.importable():
        assert any("keyhole[s3]" in each for each in forecast_of(project).notes)
