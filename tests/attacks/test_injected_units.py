"""Attack: a project that somebody else has written, whose [deploy] holds lines of a systemd unit.

The operator who installs the units that `keyhole provision` makes starts what the lines say, as
root. The planted hole is a [deploy] of any text.
"""

import pytest

from keyhole.errors import InputError
from keyhole.project import spec
from keyhole.project.kits import provision
from keyhole.project.spec import FILE, Project
from tests.project.test_spec import changed, folder, private  # noqa: F401 - a fixture

LINES = "x\\nUser=root\\nExecStartPre=/bin/touch /tmp/owned\\n"
FIELDS = {
    "data": f'data = "{LINES}"',
    "rounds": f'rounds = "/srv/{LINES}"',
    "store": f'store = "s3://bucket/{LINES}"',
    "service": f'service = "http://127.0.0.1:81{LINES.replace("x", "00", 1)}"',
}


def units(project, out):
    """All lines of the units of all kits."""
    with project.importable():
        provision(project, out, ["device-0"])
    return [line for path in out.rglob("*.service") for line in path.read_text().splitlines()]


def deployed(folder, line):  # noqa: F811
    text = (folder / FILE).read_text()
    name = line.partition(" ")[0]
    kept = "\n".join(each for each in text.splitlines() if not each.startswith(f"{name} ="))
    (folder / FILE).write_text(kept.replace("[deploy]", f"[deploy]\n{line}"))
    return Project.open(folder)


@pytest.mark.parametrize("name", FIELDS)
def test_lines_in_a_project_are_refused(folder, name):  # noqa: F811
    with pytest.raises(InputError, match="no line of a unit"):
        deployed(folder, FIELDS[name])


def test_where_any_text_is_taken_a_unit_runs_as_root(folder, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr(spec, "check_texts", lambda texts: None)
    assert "User=root" in units(deployed(folder, FIELDS["data"]), tmp_path / "kits")


def test_what_systemd_would_expand_stays_as_it_is(folder, tmp_path):  # noqa: F811
    lines = units(deployed(folder, 'data = "100%h $HOME.csv"'), tmp_path / "kits")
    (started,) = [line for line in lines if "ExecStart=" in line and " device " in line]
    assert "'100%%h $$HOME.csv'" in started
    assert {line for line in lines if line.startswith("User=")} == {"User=keyhole"}
