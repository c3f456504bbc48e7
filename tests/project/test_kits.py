"""Kits: everything that a party needs, and no secret of another."""

import os
import ssl
import subprocess
from itertools import pairwise
from pathlib import Path

import click
import pytest

from keyhole.cli.main import keyhole
from keyhole.errors import InputError
from keyhole.project.kits import check_kit, device_names, provision
from keyhole.project.parties import commands_of, device_command, trainer_args
from keyhole.project.spec import FILE, Project
from tests.project.test_spec import changed, folder, private  # noqa: F401 - a fixture

TLS = {
    "http://127.0.0.1:8100": "https://one.example:8100",
    "http://127.0.0.1:8200": "https://two.example:8200",
    "http://127.0.0.1:8110": "https://one.example:8110",
    "http://127.0.0.1:8210": "https://two.example:8210",
    "devices = 3": 'devices = 3\nrounds = "/srv/keyhole"\nstore = "s3://bucket/rounds"',
}


@pytest.fixture
def two_operators(folder):  # noqa: F811
    private(folder)
    for old, new in TLS.items():
        project = changed(folder, old, new)
    return project


def made(project, out, names=None):
    with project.importable():
        return provision(project, out, names or device_names(project.deploy.devices))


def is_secret(path):
    return path.stat().st_mode & 0o077 == 0


def test_no_secret_is_in_two_kits_but_the_key_that_two_aggregators_share(two_operators, tmp_path):
    out = tmp_path / "kits"
    made(two_operators, out)
    holders: dict[bytes, set[str]] = {}
    names: dict[bytes, set[str]] = {}
    for path in out.rglob("*"):
        if path.is_file() and is_secret(path):
            content = path.read_bytes()
            holders.setdefault(content, set()).add(path.relative_to(out).parts[0])
            names.setdefault(content, set()).add(path.name)
    shared = {frozenset(names[c]): kits for c, kits in holders.items() if len(kits) > 1}
    assert shared == {frozenset({"peer.key"}): {"aggregator-0", "aggregator-1"}}


def test_every_file_that_a_command_names_is_in_its_kit_and_every_option_is_known(
    two_operators, tmp_path
):
    out = tmp_path / "kits"
    kits = made(two_operators, out)
    for kit in kits:
        device = kit.startswith("device")
        with two_operators.importable():
            commands = (
                [device_command(two_operators, kit)] if device else commands_of(two_operators, kit)
            )
        for command in commands:
            files = [a for text in command.args for a in text.replace("#", ",").split(",")]
            for file in files:
                if Path(file).suffix in {".key", ".pub", ".token", ".pem", ".crt"}:
                    assert (out / kit / file).exists(), (kit, file)
            assert (out / kit / f"start-{command.name}.sh").stat().st_mode & 0o100
            unit = (out / kit / f"keyhole-{command.name}.service").read_text()
            assert command.line in unit
            assert parses(command.args), command.line


def test_a_kit_that_a_kill_left_half_made_is_made_anew(two_operators, tmp_path):
    out = tmp_path / "kits"
    made(two_operators, out, ["phone-1", "phone.part"])
    (out / "phone-1").rename(out / ".phone-1.part")  # as it is until all of it is there
    (out / ".phone-1.part" / "sign.pub").unlink()
    files = {path.name for path in (out / "phone.part").iterdir()}
    assert made(two_operators, out, ["phone-1", "phone.part"]) == ["phone-1"]
    named = {path.name for path in (out / "phone-1").iterdir()}
    named = {name.replace("phone-1", "phone.part") for name in named}
    assert named == files
    assert not [path for path in out.iterdir() if path.name.startswith(".")]


def test_a_trainer_that_is_done_is_not_started_again(two_operators, tmp_path):
    made(two_operators, tmp_path / "kits")
    restarts = {
        unit.stem: [line for line in unit.read_text().splitlines() if line.startswith("Restart=")]
        for unit in (tmp_path / "kits").rglob("*.service")
    }
    assert restarts.pop("keyhole-trainer") == ["Restart=on-failure"]
    assert set(map(tuple, restarts.values())) == {("Restart=always",)}


def test_a_mistake_in_the_file_leaves_no_half_made_kits(folder, tmp_path):  # noqa: F811
    project = changed(folder, "count = 20", "cuont = 20")
    with pytest.raises(InputError, match=r"did you mean keys\.film\.count"):
        made(project, tmp_path / "kits")
    assert not (tmp_path / "kits").exists()


def test_slice_services_answer_the_pages_that_the_project_names_and_aggregators_do_not(
    two_operators,
):
    named = 'devices = 3\npages = ["https://app.example", "http://127.0.0.1:8300"]'
    project = changed(two_operators.folder, "devices = 3", named)
    for party in project.deploy.urls:
        (command,) = (each for each in commands_of(project, party) if each.listens)
        assert parses(command.args)
        let_in = [b for a, b in pairwise(command.args) if a == "--allow-origin"]
        assert let_in == ([] if party.startswith("aggregator") else project.deploy.pages)


def parses(args):
    """Whether `keyhole` knows all options of a command line, without running it."""
    group, rest = keyhole, list(args)
    top = click.Context(keyhole)
    while isinstance(group, click.Group):
        _, group, rest = group.resolve_command(top, rest)
    group.make_parser(click.Context(group, parent=top)).parse_args(rest)
    return True


def test_certificates_are_of_one_authority_whose_key_is_nowhere(two_operators, tmp_path):
    out = tmp_path / "kits"
    made(two_operators, out)
    context = ssl.create_default_context(cafile=str(out / "ca.pem"))
    assert context.cert_store_stats()["x509_ca"] == 1
    for kit in ("service", "second", "aggregator-0", "aggregator-1"):
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
            out / kit / "tls.crt", out / kit / "tls.key"
        )
        subprocess.run(
            ["openssl", "verify", "-CAfile", out / "ca.pem", out / kit / "tls.crt"],
            check=True,
            capture_output=True,
        )
    keys = [p for p in out.rglob("*") if p.is_file() and b"PRIVATE KEY" in p.read_bytes()]
    assert {p.name for p in keys} == {"tls.key"}


def test_devices_are_added_and_what_is_there_stays(two_operators, tmp_path):
    out = tmp_path / "kits"
    made(two_operators, out)
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    assert made(two_operators, out, ["device-0", "shop-7"]) == ["shop-7"]
    assert {p: p.read_bytes() for p in before} == before
    assert (out / "shop-7" / "service.token").exists()


def test_kits_get_the_code_that_the_project_has_now(two_operators, tmp_path):
    out, source = tmp_path / "kits", two_operators.folder / "task.py"
    made(two_operators, out)
    source.write_text(source.read_text() + "\n# changed\n")
    assert made(two_operators, out) == []
    for kit in ("device-0", "device-2", "trainer"):
        assert (out / kit / "task.py").read_bytes() == source.read_bytes()
    assert (out / "trainer" / FILE).read_bytes() == (two_operators.folder / FILE).read_bytes()
    assert not (out / "service" / "task.py").exists()


def test_a_kit_that_leaves_this_machine_has_no_path_and_no_example_of_it(two_operators, tmp_path):
    out = tmp_path / "kits"
    made(two_operators, out)
    told = [p.read_text() for kit in ("trainer", "device-0") for p in (out / kit).glob("*.s*")]
    assert told
    assert not [text for text in told if str(two_operators.folder) in text]
    assert not (out / "device-0" / "data.csv").exists()


def test_kits_of_another_deployment_are_not_mixed(two_operators, tmp_path):
    out = tmp_path / "kits"
    made(two_operators, out)
    other = changed(two_operators.folder, "two.example:8200", "two.example:8300")
    with pytest.raises(InputError, match="another \\[deploy\\]"):
        made(other, out)
    with pytest.raises(InputError, match="another \\[deploy\\]"):
        check_kit(other, out / "trainer")


@pytest.mark.parametrize("name", ["service", "trainer", "../out", ""])
def test_a_device_cannot_take_the_place_of_a_party(two_operators, tmp_path, name):
    with pytest.raises(InputError):
        made(two_operators, tmp_path / "kits", [name])


def test_a_run_of_a_name_has_a_folder_of_its_own_at_both_servers(two_operators):
    folder = two_operators.folder  # noqa: F811
    for party in ("one", "two"):
        port = 8100 if party == "one" else 8200
        url = f"https://{party}.example:{port}"
        if party == "two":
            project = changed(folder, url, f"{url}/runs/tags")
        else:
            with pytest.raises(InputError, match="different runs: got '' at second and 'tags'"):
                changed(folder, url, f"{url}/runs/tags")
    trainer = trainer_args(project, Path("kit"))
    assert trainer[:2] == ["--devices", "/srv/keyhole/tags"]
    (served, push), (second, pull) = (commands_of(project, p) for p in ("service", "second"))
    assert (served.args[:2], push.args[2]) == (("serve", "/srv/keyhole"), "/srv/keyhole/tags")
    assert (second.args[:2], pull.args[3]) == (("serve", "rounds"), "rounds/tags")
    assert device_command(project, "ann").args[1] == "https://one.example:8100/runs/tags"


def test_devices_of_kits_keep_examples_out_of_training_unless_told(two_operators):
    for told, share in (("", "0.2"), ("\nhold_out = 0.5", "0.5"), ("\nhold_out = 0", "0")):
        project = changed(two_operators.folder, "devices = 3", f"devices = 3{told}")
        args = device_command(project, "ann").args
        assert args[args.index("--hold-out") + 1] == share
        changed(two_operators.folder, f"devices = 3{told}", "devices = 3")


def test_requests_stand_in_place_of_certificates(two_operators, tmp_path):
    project = changed(two_operators.folder, "devices = 3", 'devices = 3\ncertificates = "requests"')
    made(project, tmp_path / "kits")
    request = tmp_path / "kits" / "service" / "tls.csr"
    assert b"BEGIN CERTIFICATE REQUEST" in request.read_bytes()
    assert not (tmp_path / "kits" / "ca.pem").exists()


def test_kits_can_be_read_by_their_owner_alone(folder, tmp_path):  # noqa: F811
    made(Project.open(folder), tmp_path / "kits")
    for kit in (tmp_path / "kits").iterdir():
        if kit.is_dir():
            assert kit.stat().st_mode & 0o077 == 0
            assert os.access(kit, os.R_OK)
