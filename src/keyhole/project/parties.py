"""Says what each party of a deployment runs: one command line each, for units and try-outs alike.

Every command stands in the folder of its kit, and names its files from there.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from keyhole.errors import InputError
from keyhole.project.spec import DeploySpec, Project, host_of, is_loopback, port_of

TRAINER, SERVICE, SECOND = "trainer", "service", "second"
SIGNING, PINNED = "sign.key", "sign.pub"
"""The trainer's key, and its public half, which devices pin."""
AUTHORITY, CERTIFICATE, CERTIFICATE_KEY = "ca.pem", "tls.crt", "tls.key"
TOKEN_KEY, PEER_KEY, TRAINER_KEY = "token.key", "peer.key", "trainer.key"
_EVERYWHERE = "0.0.0.0"  # a service that others reach  # nosec B104
SUMS, COPY, CACHE, STATES = "sums", "rounds", "cache", "states"


@dataclass(frozen=True)
class Command:
    """What one process of a party runs.

    Args:
        name: of the process, and of its unit.
        args: of `keyhole`.
        listens: whether it serves, and says so once it does.
        folder: that must be there when it starts.
        restart: when systemd starts it again: a trainer is done once it ends well.
    """

    name: str
    args: tuple[str, ...]
    listens: bool = False
    folder: str = "."
    restart: Literal["always", "on-failure"] = "always"

    @property
    def line(self) -> str:
        """The command as a shell takes it."""
        return shlex.join(["keyhole", *self.args])


def aggregator_name(party: int) -> str:
    """Returns the name of an aggregator's kit."""
    return f"aggregator-{party}"


def token_of(party: str) -> str:
    """Returns the file with somebody's token for a party."""
    return f"{party}.token"


def seal_of(party: int) -> str:
    """Returns the file with the public key of an aggregator."""
    return f"seal-{party}.pub"


def check_parties(project: Project) -> None:
    """Raises InputError where the parties are not those that the run needs."""
    deploy, about = project.deploy, project.delivery
    name, servers = (None, 1) if about is None else (about.name, about.servers)
    if about is not None and about.is_private and about.route != "queries":
        raise InputError(
            f"a project deploys no {name}: got it as delivery; expected one by private "
            "queries, or none; deploy it by hand (docs/operate.md)"
        )
    if (servers == 2) != (deploy.second is not None):
        what = f"{name} needs a second slice server" if servers == 2 else "nobody asks second"
        raise InputError(
            f"{what}: got second = {deploy.second!r} in [deploy] and delivery = {name!r}; expected "
            "both or neither; change one of them"
        )
    if not (deploy.is_local or Path(deploy.rounds).is_absolute()):
        raise InputError(
            f"trainer and service share a folder of their machine: got rounds = {deploy.rounds!r} "
            "in [deploy]; expected a path from the root, such as /srv/keyhole; write it"
        )
    if deploy.second is not None and not (deploy.is_local or deploy.store):
        raise InputError(
            "the second operator has no way to the rounds: got no store in [deploy]; expected one, "
            "such as s3://bucket/rounds; name it"
        )


def rounds_of(project: Project) -> Path:
    """Returns the directory of the run's rounds on the first operator's machine."""
    return project.folder / project.deploy.rounds / project.deploy.run


def commands_of(project: Project, party: str) -> list[Command]:
    """Returns what a party other than a device runs."""
    deploy = project.deploy
    if party == TRAINER:
        where = "--project", str(project.folder) if deploy.is_local else "."
        args = "run", *where, "--deploy", "--kit", "."
        return [Command(TRAINER, args, restart="on-failure")]
    listen = _listens(deploy.urls[party])
    if party == SERVICE:
        rounds, folder = str(rounds_of(project)), str(project.folder / deploy.rounds)
        served = ("serve", folder, *listen, *_lets_in(deploy), *_queries(project, 0))
        served += ("--again", "1") if deploy.is_local else ()
        found = [Command(SERVICE, served, listens=True, folder=folder)]
        if deploy.second and deploy.store:
            push = "mirror", "push", rounds, deploy.store, "--watch"
            found.append(Command("push", push, folder=rounds))
        return found
    if party == SECOND:
        # One machine has them already.
        copy = COPY if deploy.store else str(project.folder / deploy.rounds)
        served = ("serve", copy, *listen, *_lets_in(deploy), *_queries(project, 1))
        found = [Command(SECOND, served, listens=True, folder=copy)]
        if deploy.store:
            into = str(Path(COPY) / deploy.run)
            found.append(Command("pull", ("mirror", "pull", deploy.store, into, "--watch")))
        return found
    return [Command(party, ("aggregator", SUMS, *listen, *_peer(deploy, party)), listens=True)]


def device_command(project: Project, name: str) -> Command:
    """Returns what a device runs."""
    deploy = project.deploy
    args = ["device", deploy.service, "--token-file", token_of(SERVICE), "--trainer-key", PINNED]
    args += ["--task", project.spec.task.name]
    args += ["--data", deploy.data, "--hold-out", f"{deploy.hold_out:g}"]
    args += ["--cache", CACHE, "--states", STATES, *_trusts(deploy.service, "--ca")]
    if deploy.second:
        args += ["--second", deploy.second, "--second-token-file", token_of(SECOND)]
    if deploy.aggregators:
        sealed = (f"{url}#{seal_of(party)}" for party, url in enumerate(deploy.aggregators))
        tokens = (token_of(aggregator_name(party)) for party in (0, 1))
        args += ["--aggregators", ",".join(sealed), "--aggregator-tokens", ",".join(tokens)]
        args += ["--ledger", "ledger"]
    return Command(name, tuple(args))


def simulating_args(project: Project) -> list[str]:
    """Returns what `keyhole train` is given beside the run where no device checks in: the file may
    have fields for those that do."""
    return [
        part
        for name in project.of_check_ins
        for part in (f"--{name.replace('_', '-')}", "fixed" if name == "sampling" else "0")
    ]


def trainer_args(project: Project, kit: Path) -> list[str]:
    """Returns what `keyhole train` is given beside the run, with the files of the trainer's kit."""
    deploy = project.deploy
    args = ["--devices", str(rounds_of(project)), "--signing-key", str(kit / SIGNING)]
    args += ["--sampling", "check-in"]
    if deploy.aggregators:
        tokens = (str(kit / token_of(aggregator_name(party))) for party in (0, 1))
        args += ["--aggregators", ",".join(deploy.aggregators)]
        args += ["--aggregator-tokens", ",".join(tokens)]
        args += _trusts(deploy.aggregators[0], "--aggregator-ca", kit)
    return args


def _lets_in(deploy: DeploySpec) -> Iterator[str]:
    """Of a slice server: whose tokens are good, and which pages of browsers it answers."""
    yield from ("--token-key", TOKEN_KEY)
    for origin in deploy.pages:
        yield from ("--allow-origin", origin)


def _queries(project: Project, server: int) -> Iterator[str]:
    """Of a server of private queries, if slices come by those."""
    about = project.delivery
    if about is not None and about.route == "queries":
        yield from ("--pir", f"{about.name}/{server}")


def _peer(deploy: DeploySpec, name: str) -> list[str]:
    """Of an aggregator: who it is, who the other one is, and whom it lets in."""
    party = [aggregator_name(0), aggregator_name(1)].index(name)
    other = deploy.aggregators[1 - party]
    args = ["--party", str(party), "--peer", other, "--peer-key", PEER_KEY]
    args += ["--token-key", TOKEN_KEY, "--trainer-key", TRAINER_KEY]
    return args + _trusts(other, "--peer-ca")


def _listens(url: str) -> list[str]:
    """Where a service listens: at all addresses of its machine, unless it is for that alone."""
    host = host_of(url)
    args = ["--host", host if is_loopback(host) else _EVERYWHERE, "--port", str(port_of(url))]
    if url.startswith("https:"):
        args += ["--tls-cert", CERTIFICATE, "--tls-key", CERTIFICATE_KEY]
    return args


def _trusts(url: str, option: str, kit: Path = Path()) -> list[str]:
    """Whom to trust for an https address: the authority of the deployment."""
    return [option, str(kit / AUTHORITY)] if url.startswith("https:") else []
