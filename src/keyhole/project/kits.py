"""Makes a start-up kit for each party of a deployment: its keys, tokens, certificate and units.

A kit is a folder that its party takes away: all that it needs, and no secret of another party, but
for the key by which two aggregators know each other, which is in both their kits. The person who
makes the kits sees all secrets; two operators who do not trust one person with that make their own
keys (docs/deploy.md, step 7).
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from keyhole.errors import InputError
from keyhole.files import (
    SECRET,
    make_directory,
    replacing,
    storage_errors,
    sync_directory,
    write_all,
)
from keyhole.project.certificates import Authority
from keyhole.project.parties import (
    AUTHORITY,
    CERTIFICATE,
    CERTIFICATE_KEY,
    PEER_KEY,
    PINNED,
    SECOND,
    SERVICE,
    SIGNING,
    SUMS,
    TOKEN_KEY,
    TRAINER,
    TRAINER_KEY,
    Command,
    aggregator_name,
    check_parties,
    commands_of,
    device_command,
    seal_of,
    token_of,
)
from keyhole.project.spec import FILE, Project, host_of
from keyhole.service.access import Audience, Keyring, check_device_name, new_key
from keyhole.service.sum_files import sealing_key
from keyhole.wire.signing import SigningKey

_STATE = "kits.json"
_PART = ".{name}.part"  # a kit that is not whole yet; no name of a device begins with a dot
_DAY = 86_400.0
_EXPANDED = {"%": "%%", "$": "$$"}  # what systemd puts something else in place of

_UNIT = """[Unit]
Description=keyhole {name}
After=network-online.target

[Service]
User=keyhole
WorkingDirectory=/etc/keyhole/{party}
ExecStartPre=/bin/mkdir -p {folder}
ExecStart=/opt/keyhole/bin/{line}
Restart={restart}
RestartSec=2
LimitNOFILE=65536
NoNewPrivileges=true
CacheDirectory=keyhole
Environment=NUMBA_CACHE_DIR=/var/cache/keyhole

[Install]
WantedBy=multi-user.target
"""

_SCRIPT = """#!/bin/sh
# Starts {name} from the folder of this kit.
cd "$(dirname "$0")" && mkdir -p {folder} && exec {line} "$@"
"""


def device_names(count: int) -> list[str]:
    """Returns the names of the first devices."""
    return [f"device-{number}" for number in range(count)]


def provision(project: Project, out: Path, names: Iterable[str]) -> list[str]:
    """Writes the kits of a deployment; of one that is there, those of devices that have none.

    Args:
        project: what is deployed.
        out: folder of kits, each in a folder of its own.
        names: of devices.

    Returns:
        The names of the kits that were made.

    Raises:
        InputError: the file cannot be used, the parties do not fit the run, or there are kits of
            another [deploy].
    """
    check_parties(project)
    _ = project.spec  # raises what the file has wrong before anything is written
    wanted = [check_device_name(name) for name in dict.fromkeys(names)]
    services = list(project.deploy.urls)
    _check_names(wanted, services)
    mark, made = _mark_of(project), list[str]()
    if _is_new(out, mark):
        make_directory(out)
        out.chmod(0o700)
        made = _make_services(project, out, services)
        _write(out / _STATE, json.dumps({"deploy": mark}).encode(), is_secret=False)
    made += _make_devices(project, out, wanted)
    _refresh_code(project, out)
    return made


def check_kit(project: Project, kit: Path) -> None:
    """Raises InputError where a kit beside others was made for another [deploy]."""
    if (kit.parent / _STATE).exists():
        _is_new(kit.parent, _mark_of(project))


def _refresh_code(project: Project, out: Path) -> None:
    """Gives kits the code that the run has now: devices refuse rounds of another one."""
    for source in (project.folder / FILE, *_sources(project)):
        for known in out.glob(f"*/{source.name}"):
            if known.read_bytes() != source.read_bytes():
                _write(known, source.read_bytes(), is_secret=False)


def _check_names(wanted: Iterable[str], services: Iterable[str]) -> None:
    for name in wanted:
        if name in (TRAINER, *services):
            raise InputError(
                f"a device has the name of a service: got {name}; expected another name; rename it"
            )


def _is_new(out: Path, mark: str) -> bool:
    """Whether there are no kits yet; raises InputError where there are those of something else."""
    if not out.exists() or not any(out.iterdir()):
        return True
    try:
        known = json.loads((out / _STATE).read_text())["deploy"]
    except (OSError, ValueError, KeyError, TypeError):
        raise InputError(
            f"{out} holds something else than kits, or kits that were not finished: got no "
            f"{_STATE}; expected an empty folder; name another one, or remove it"
        ) from None
    if known != mark:
        raise InputError(
            f"{out} holds kits of another [deploy]: got kits made before it changed; expected kits "
            "of this one; put it back, or remove the folder: new kits are made, with new secrets"
        )
    return False


def _mark_of(project: Project) -> str:
    """What tells a deployment from another: addresses and deliveries, but no number of devices."""
    about = project.delivery
    told = {**project.deploy.urls, "delivery": about.name if about else None}
    told |= {"rounds": project.deploy.rounds, "store": project.deploy.store}
    told |= {f"page {number}": origin for number, origin in enumerate(project.deploy.pages)}
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def _make_services(project: Project, out: Path, services: list[str]) -> list[str]:
    """Makes the kits of the trainer and of all services."""
    deploy, key = project.deploy, SigningKey.fresh()
    folders = {name: _folder(out / name) for name in (TRAINER, *services)}
    _write(folders[TRAINER] / SIGNING, key.encode().encode())
    _write(out / PINNED, key.public.encode().encode(), is_secret=False)
    for name in services:
        _write(folders[name] / TOKEN_KEY, f"{new_key()}\n".encode())
    if deploy.aggregators:
        _make_aggregators(project, out, folders)
    _make_certificates(project, out, folders)
    if not deploy.is_local:  # it leaves this machine, and takes what it trains along
        for source in (project.folder / FILE, *_sources(project)):
            _write(folders[TRAINER] / source.name, source.read_bytes(), is_secret=False)
    for name, folder in folders.items():
        _write_starts(name, folder, commands_of(project, name))
    return [TRAINER, *services]


def _make_aggregators(project: Project, out: Path, folders: Mapping[str, Path]) -> None:
    """The keys of two aggregators, and the trainer's tokens for them."""
    peer = f"{new_key()}\n".encode()
    for party in (0, 1):
        name = aggregator_name(party)
        _write(folders[name] / PEER_KEY, peer)
        _write(folders[name] / TRAINER_KEY, f"{new_key()}\n".encode())
        token = _token(project, Keyring.load(folders[name] / TRAINER_KEY), TRAINER, "aggregator")
        _write(folders[TRAINER] / token_of(name), token)
        seal = sealing_key(folders[name] / SUMS)
        _write(out / seal_of(party), f"{seal.public.hex()}\n".encode(), is_secret=False)


def _make_certificates(project: Project, out: Path, folders: Mapping[str, Path]) -> None:
    """Certificates of https addresses; the authority's key is written nowhere."""
    encrypted = {n: url for n, url in project.deploy.urls.items() if url.startswith("https:")}
    if not encrypted:
        return
    is_real = project.deploy.certificates == "requests"
    authority = Authority.fresh()
    if not is_real:
        _write(out / AUTHORITY, authority.certificate, is_secret=False)
    for name, url in encrypted.items():
        made = authority.issue(host_of(url), only_request=is_real)
        _write(folders[name] / CERTIFICATE_KEY, made.key)
        suffix = "tls.csr" if is_real else CERTIFICATE
        _write(folders[name] / suffix, made.certificate, is_secret=False)
    if not is_real:
        for folder in folders.values():
            _write(folder / AUTHORITY, authority.certificate, is_secret=False)


def _make_devices(project: Project, out: Path, names: Iterable[str]) -> list[str]:
    """Makes the kits of devices that have none. Each appears whole: a kill leaves parts of kits
    under another name, which are made anew. The disk is waited for once."""
    sources = [(path.name, path.read_bytes()) for path in _sources(project)]
    command, rings = device_command(project, ""), _rings(project, out)
    public = [each for each in (PINNED, AUTHORITY, seal_of(0), seal_of(1)) if (out / each).exists()]
    shared = [*sources, *((name, (out / name).read_bytes()) for name in public)]
    parts = dict[str, Path]()
    for part in out.glob(_PART.format(name="*")):
        shutil.rmtree(part)
    for name in names:
        if not (out / name).exists():
            parts[name] = _folder(out / _PART.format(name=name))
            _fill_device(project, parts[name], name, rings, shared)
            _write_starts(name, parts[name], [replace(command, name=name)], is_new=True)
    os.sync()
    for name, part in parts.items():
        part.rename(out / name)
    sync_directory(out)
    return list(parts)


def _rings(project: Project, out: Path) -> dict[str, tuple[Keyring, Audience]]:
    """The keys that sign a device's tokens, by whom it shows them to."""
    deploy = project.deploy
    whom: dict[str, Audience] = {SERVICE: "slices"}
    whom |= {SECOND: "slices"} if deploy.second else {}
    whom |= {aggregator_name(p): "aggregator" for p in range(len(deploy.aggregators))}
    return {name: (Keyring.load(out / name / TOKEN_KEY), kind) for name, kind in whom.items()}


def _fill_device(
    project: Project,
    folder: Path,
    name: str,
    rings: Mapping[str, tuple[Keyring, Audience]],
    shared: Iterable[tuple[str, bytes]],
) -> None:
    """A device's kit: tokens for whom it asks, what it pins, and the code of the task."""
    deploy = project.deploy
    for party, (ring, audience) in rings.items():
        _write(folder / token_of(party), _token(project, ring, name, audience), is_new=True)
    for file, content in shared:
        _write(folder / file, content, is_secret=False, is_new=True)
    rehearsed = project.folder / "devices" / f"{name}{Path(deploy.data).suffix}"
    if deploy.is_local and rehearsed.is_file():  # examples for a try-out; a real device has its own
        _write(folder / deploy.data, rehearsed.read_bytes(), is_new=True)


def _sources(project: Project) -> Iterator[Path]:
    """Files of the project whose code the run names: a device needs the same."""
    names = {ref.name for _, ref in project.spec.parts() if ref.is_own}
    for module in sorted({name.partition(":")[0] for name in names}):
        path = project.folder / f"{module}.py"
        if path.exists():
            yield path


def _token(project: Project, ring: Keyring, name: str, audience: Audience) -> bytes:
    seconds = project.deploy.token_days * _DAY
    token = ring.issue("device", name, now=time.time(), seconds=seconds, audience=audience)
    return f"{token}\n".encode()


def _write_starts(
    party: str, folder: Path, commands: Iterable[Command], is_new: bool = False
) -> None:
    """A script and a unit for each process."""
    for command in commands:
        told: dict[str, str] = {"name": command.name, "party": party, "line": command.line}
        told |= {"folder": shlex.quote(command.folder), "restart": command.restart}
        script = folder / f"start-{command.name}.sh"
        _write(script, _SCRIPT.format(**told).encode(), is_secret=False, is_new=is_new)
        script.chmod(0o755)
        unit, literal = folder / f"keyhole-{command.name}.service", str.maketrans(_EXPANDED)
        told = {name: text.translate(literal) for name, text in told.items()}
        _write(unit, _UNIT.format(**told).encode(), is_secret=False, is_new=is_new)


def _folder(path: Path) -> Path:
    make_directory(path)
    path.chmod(0o700)
    return path


def _write(path: Path, content: bytes, is_secret: bool = True, is_new: bool = False) -> None:
    """Replaces a file, or makes one of a folder that is not in its place yet: no disk is waited
    for."""
    if not is_new:
        with replacing(path, secret=is_secret) as descriptor:
            write_all(descriptor, [content])
        return
    with storage_errors(path, "write"):
        mode = SECRET if is_secret else 0o644
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
