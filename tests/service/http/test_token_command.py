"""`keyhole token`: a key file that works, and tokens that it signs."""

import json
import stat
import time

import pytest
from click.testing import CliRunner

from keyhole.cli.token import token
from keyhole.errors import InputError
from keyhole.service.access import DenyList, Keyring


def run(*args):
    done = CliRunner().invoke(token, [str(arg) for arg in args])
    if isinstance(done.exception, InputError):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.stdout.strip()


def test_a_new_key_signs_tokens_that_it_verifies(tmp_path):
    file = tmp_path / "key"
    run("new-key", file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    made = run("issue", "--key", file, "--device", "phone-1", "--days", "2", "--max-keys", "9")
    claims = Keyring.load(file).verify(made.encode(), time.time())
    assert (claims.kind, claims.device, claims.max_keys) == ("device", "phone-1", 9)
    assert claims.expires - claims.issued == 2 * 86_400


def test_a_token_says_which_runs_it_is_good_for(tmp_path):
    run("new-key", tmp_path / "key")
    issue = "issue", "--key", tmp_path / "key", "--device", "x"
    made = run(*issue, "--run", "tags", "--run", "films")
    (tmp_path / "token").write_text(made)
    assert json.loads(run("show", tmp_path / "token"))["runs"] == ["tags", "films"]
    with pytest.raises(InputError, match="not the name of a run"):
        run(*issue, "--run", "../tags")


def test_a_key_is_never_replaced(tmp_path):
    file = tmp_path / "key"
    run("new-key", file)
    before = file.read_bytes()
    with pytest.raises(InputError, match="exist"):
        run("new-key", file)
    assert file.read_bytes() == before


def test_a_device_needs_a_name_that_can_be_one(tmp_path):
    run("new-key", tmp_path / "key")
    with pytest.raises(InputError, match="name of a device"):
        run("issue", "--key", tmp_path / "key", "--device", "../x")


def test_a_token_is_for_slices_and_a_week_unless_told(tmp_path):
    run("new-key", tmp_path / "key")
    claims = Keyring.load(tmp_path / "key").verify(
        run("issue", "--key", tmp_path / "key", "--device", "x").encode(), time.time()
    )
    assert (claims.audience, claims.expires - claims.issued) == ("slices", 7 * 86_400)


def test_each_aggregator_gets_a_key_that_follows_from_the_services(tmp_path):
    run("new-key", tmp_path / "key")
    for party in (0, 1):
        run("aggregator-key", tmp_path / "key", party, tmp_path / f"sums-{party}")
    rings = [Keyring.load(tmp_path / name) for name in ("key", "sums-0", "sums-1")]
    assert rings[1:] == [rings[0].for_aggregator(party) for party in (0, 1)]
    assert len({ring.keys for ring in rings}) == 3
    with pytest.raises(InputError, match="does not exist yet"):
        run("aggregator-key", tmp_path / "key", 0, tmp_path / "sums-0")


def test_the_id_that_show_tells_can_be_denied(tmp_path):
    run("new-key", tmp_path / "key")
    made = run("issue", "--key", tmp_path / "key", "--device", "x", "--audience", "relay")
    (tmp_path / "token").write_text(made)
    told = json.loads(run("show", tmp_path / "token"))
    assert (told["device"], told["audience"]) == ("x", "relay")
    (tmp_path / "deny").write_text("# who lost a phone")
    run("deny", tmp_path / "deny", told["id"], "f" * 32)
    assert "0 denied, 1 were before" in run("deny", tmp_path / "deny", told["id"])
    listed = DenyList(tmp_path / "deny")
    assert told["id"] in listed
    assert "f" * 32 in listed
    with pytest.raises(InputError, match="not the id"):
        run("deny", tmp_path / "deny", "phone-17")
    with pytest.raises(InputError, match="nothing was denied"):
        run("deny", tmp_path / "denied", told["id"])
    assert not (tmp_path / "denied").exists()
