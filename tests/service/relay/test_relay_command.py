"""`keyhole relay` and the keys of a gateway: what an operator types, and what goes wrong."""

import socket
import stat

import pytest
from click.testing import CliRunner

from keyhole.cli.main import keyhole
from keyhole.delivery.relay.ohttp import (
    GatewayKey,
    encode_configs,
    encode_gateway_key,
    load_gateway_keys,
)
from keyhole.errors import InputError


def run(*args):
    return CliRunner().invoke(keyhole, [str(arg) for arg in args])


def test_a_gateway_key_is_written_for_its_owner_and_read_again(tmp_path):
    file = tmp_path / "gateway.key"
    assert run("token", "gateway-key", file, "--number", 7).exit_code == 0
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    (key,) = load_gateway_keys(file)
    assert key.key_id == 7
    before = file.read_bytes()
    again = run("token", "gateway-key", file)
    assert isinstance(again.exception, InputError)
    assert file.read_bytes() == before


def test_key_files_that_others_can_read_or_that_hold_something_else_are_refused(tmp_path):
    file = tmp_path / "gateway.key"
    with pytest.raises(InputError, match="cannot read"):
        load_gateway_keys(file)
    file.write_text(encode_gateway_key(GatewayKey.fresh()))
    file.chmod(0o644)
    with pytest.raises(InputError, match="read by others"):
        load_gateway_keys(file)
    file.chmod(0o600)
    load_gateway_keys(file)
    for content in (b"\xff", b"", b"1 abc"):
        file.write_bytes(content)
        with pytest.raises(InputError):
            load_gateway_keys(file)


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--gateway",),
        ("--gateway", "http://127.0.0.1:9", "--mix-ms", "-1"),
        ("--gateway", "http://127.0.0.1:9", "--mix-ms", "60001"),
        ("--gateway", "http://127.0.0.1:9", "--mix-count", "0"),
        ("--gateway", "http://127.0.0.1:9", "--port", "70000"),
        ("--gateway", "http://127.0.0.1:9", "--tls-cert", "/no/such/file"),
        ("--gateway", "http://127.0.0.1:9", "--rate-per-address", "0"),
        ("--gateway", "http://127.0.0.1:9", "another"),
    ],
)
def test_bad_flags_are_usage_errors(flags):
    assert run("relay", "--open", *flags).exit_code == 2


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--gateway", "ftp://x"), "not the URL of a service"),
        (("--gateway", "http://example.org"), "in the clear"),
        (("--gateway", "http://127.0.0.1:9", "--host", "0.0.0.0"), "others could read"),
    ],
)
def test_what_cannot_be_relayed_safely_is_refused(flags, told):
    done = run("relay", "--open", "--port", 0, *flags)
    assert isinstance(done.exception, InputError)
    assert told in str(done.exception)


def test_a_file_without_a_token_is_refused(tmp_path):
    file = tmp_path / "token"
    file.write_text("two words")
    done = run(
        "relay", "--open", "--port", 0, "--gateway", "http://127.0.0.1:9", "--token-file", file
    )
    assert isinstance(done.exception, InputError)
    assert "no token" in str(done.exception)


@pytest.mark.parametrize("wrong", ["url", "token"])
def test_what_is_wrong_is_told_before_a_port_is_taken(tmp_path, wrong):
    (tmp_path / "token").write_text("two words")
    token = ("--token-file", tmp_path / "token") if wrong == "token" else ()
    url = "ftp://x" if wrong == "url" else "http://127.0.0.1:9"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = run("relay", "--open", "--port", taken.getsockname()[1], "--gateway", url, *token)
    told = {"url": "not the URL of a service", "token": "no token"}
    assert told[wrong] in str(done.exception)


def test_devices_are_given_a_file_of_what_the_gateway_says_of_its_keys(tmp_path):
    key_file, file = tmp_path / "gateway.key", tmp_path / "gateway.config"
    assert run("token", "gateway-key", key_file, "--number", 7).exit_code == 0
    key_file.write_text(encode_gateway_key(GatewayKey.fresh(8)) + key_file.read_text())
    assert run("token", "gateway-config", key_file, file).exit_code == 0
    told = encode_configs([key.config for key in load_gateway_keys(key_file)])
    assert file.read_bytes() == told
    assert stat.S_IMODE(file.stat().st_mode) & 0o444
    assert run("token", "gateway-config", key_file).stdout_bytes == told


def test_a_file_that_is_there_is_not_replaced_least_of_all_the_key(tmp_path):
    key_file = tmp_path / "gateway.key"
    assert run("token", "gateway-key", key_file).exit_code == 0
    before = key_file.read_bytes()
    assert isinstance(run("token", "gateway-config", key_file, key_file).exception, InputError)
    assert key_file.read_bytes() == before


def test_a_relay_is_told_who_is_let_in():
    done = run("relay", "--port", 0, "--gateway", "http://127.0.0.1:9")
    assert done.exit_code == 2
    assert "--token-key" in done.output
