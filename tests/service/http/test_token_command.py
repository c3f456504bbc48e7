"""`keyhole token`: a key file that works, and tokens that it signs."""

import stat
import time

import pytest
from click.testing import CliRunner

from keyhole.cli.token import token
from keyhole.errors import InputError
from keyhole.service.access import Keyring


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
