"""Signatures of manifests: what one key signs, no other key and no other round passes for."""

import stat

import pytest
from click.testing import CliRunner

from keyhole.cli.token import token
from keyhole.delivery.records import Records
from keyhole.device.fetch import refuse_unbound
from keyhole.errors import AccessError, InputError, RequestError
from keyhole.wire.manifest import describe_round, name_round, table_info
from keyhole.wire.settings import sum_settings
from keyhole.wire.signing import SigningKey, TrainerKey, read_signature

ROUND, OTHER = name_round(b"one", 3), name_round(b"two", 3)


def test_a_key_pair_is_written_once_and_the_private_half_for_its_owner_alone(tmp_path):
    private, public = tmp_path / "key", tmp_path / "key.pub"
    run = CliRunner()
    assert run.invoke(token, ["signing-key", str(private), str(public)]).exit_code == 0
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    signature = SigningKey.load(private).sign(ROUND)
    TrainerKey.load(public).check(ROUND, signature)
    before = private.read_bytes()
    assert run.invoke(token, ["signing-key", str(private), str(public)]).exit_code != 0
    assert private.read_bytes() == before


def test_every_flipped_bit_of_a_signature_is_found():
    key = SigningKey.fresh()
    signature = key.sign(ROUND)
    for bit in range(0, 512, 7):
        flipped = bytearray(signature)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(AccessError, match="not the trainer's"):
            key.public.check(ROUND, bytes(flipped))
    with pytest.raises(AccessError):
        key.public.check(OTHER, signature)
    with pytest.raises(AccessError, match="got no signature"):
        key.public.check(ROUND, None)


@pytest.mark.parametrize("text", [None, "", "00", "zz", "00" * 63, "00" * 65])
def test_what_is_no_signature_counts_as_none(text):
    assert read_signature(text) is None


@pytest.mark.parametrize("content", ["", "00", "zz" * 32, "00" * 33])
def test_a_file_without_a_key_is_refused(tmp_path, content):
    (tmp_path / "key").touch(0o600)
    (tmp_path / "key").write_text(content)
    for kind in (SigningKey, TrainerKey):
        with pytest.raises(InputError, match=r"got something else; expected .* 64 hex digits"):
            kind.load(tmp_path / "key")


def test_neither_half_of_a_pair_is_taken_for_the_other(tmp_path):
    """Who signed with the public half would let everybody sign."""
    private, public = tmp_path / "key", tmp_path / "key.pub"
    CliRunner().invoke(token, ["signing-key", str(private), str(public)], catch_exceptions=False)
    public.chmod(0o600)
    with pytest.raises(InputError, match="does not hold a signing key: got a public key"):
        SigningKey.load(public)
    with pytest.raises(InputError, match="a trainer's public key: got a private key"):
        TrainerKey.load(private)


def test_a_private_key_that_others_can_read_is_refused(tmp_path):
    private = tmp_path / "key"
    CliRunner().invoke(token, ["signing-key", str(private), str(tmp_path / "key.pub")])
    private.chmod(0o644)
    with pytest.raises(InputError, match=r"can be read by others: got mode 644"):
        SigningKey.load(private)


def test_a_table_without_a_root_is_refused_where_there_is_a_secure_sum():
    tables = [table_info(Records("word", 5, ()))]
    refuse_unbound(describe_round(None, tables, 0, 0, {}), [0])
    secure = describe_round(None, tables, 0, 0, sum_settings(b"params"))
    with pytest.raises(RequestError, match="bound to nothing"):
        refuse_unbound(secure, [0])
