"""Reads a project: keyhole.toml has the fields of a run and, below them, where its parties are."""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from keyhole.delivery import delivery_named
from keyhole.delivery.base import DeliveryAbout
from keyhole.errors import InputError
from keyhole.experiments.specs import fields_of, spec_of
from keyhole.parts import near_miss
from keyhole.rounds.cohorts import OF_CHECK_INS
from keyhole.rounds.fields import flatten
from keyhole.rounds.spec import RunSpec
from keyhole.service.origins import check_origin
from keyhole.service.status import is_run_name

FILE = "keyhole.toml"
_LOOPBACK = "localhost"


class DeploySpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the parties of a run are, as all others reach them: the table [deploy] of keyhole.toml.

    Args:
        service: the slice service, which the trainer's operator runs; with /runs/NAME behind it
            where the run is one of several of that service.
        second: the second slice server of a private delivery, which another operator runs.
        aggregators: the two parties that add up shares of updates; none adds them up in the clear.
        rounds: directory that the service serves and the trainer publishes rounds to; a run of a
            name has a folder of that name in it.
        store: object store or file:///directory through which the second operator gets the rounds;
            without it both slice servers read `rounds`, which only a try-out on one machine does.
        devices: how many device kits there are at first, and devices in a try-out.
        data: what a device passes as --data: a file in its kit, or module:NAME.
        hold_out: share of its examples that a device does not train on, and measures with.
        token_days: how long tokens are good.
        certificates: of https addresses: of an authority made for this deployment alone, or
            requests for a real one.
        pages: origins whose pages may use the slice services from a browser.
        force: whether to train though a private delivery sends more than the whole model.
    """

    service: str = "http://127.0.0.1:8100"
    second: str | None = None
    aggregators: list[str] = []
    rounds: str = "rounds"
    store: str | None = None
    devices: Annotated[int, Meta(ge=0)] = 3
    data: str = "data.csv"
    hold_out: Annotated[float, Meta(ge=0, lt=1)] = 0.2
    token_days: Annotated[float, Meta(gt=0, le=3650)] = 7.0
    certificates: Literal["throw-away", "requests"] = "throw-away"
    pages: list[str] = []
    force: bool = False

    def __post_init__(self) -> None:
        check_texts((*self.pages, *self.urls.values(), self.rounds, self.store or "", self.data))
        for origin in self.pages:
            check_origin(origin)
        if len(self.aggregators) not in (0, 2):
            raise InputError(
                f"shares go to two aggregators: got {len(self.aggregators)} in [deploy]; expected "
                "two addresses, or none for sums in the clear; name both"
            )
        for name, url in self.urls.items():
            check_url(url, may_name_run=name in ("service", "second"))
        if self.second is not None and run_of(self.second) != self.run:
            raise InputError(
                "the two slice servers are asked for different runs: got "
                f"{run_of(self.second)!r} at second and {self.run!r} at service in [deploy]; "
                "expected one name behind /runs/, or none, in both; change one of them"
            )
        taken = list(self.urls.values())
        for url in taken:
            if taken.count(url) > 1:
                raise InputError(
                    f"two parties have one address: got {url} twice in [deploy]; expected one for "
                    "each; give one of them another port"
                )

    @property
    def run(self) -> str:
        """The name of the run at the service; empty where it is the only one."""
        return run_of(self.service)

    @property
    def urls(self) -> dict[str, str]:
        """The addresses of all services, by the name of their kit."""
        known = {"service": self.service, "second": self.second}
        known |= {f"aggregator-{party}": url for party, url in enumerate(self.aggregators)}
        return {name: url for name, url in known.items() if url is not None}

    @property
    def is_local(self) -> bool:
        """Whether all of them are on this machine."""
        return all(is_loopback(host_of(url)) for url in self.urls.values())


def host_of(url: str) -> str:
    """Returns the host of an address."""
    return urlsplit(url).hostname or ""


def port_of(url: str) -> int:
    """Returns the port of an address."""
    return urlsplit(url).port or (443 if url.startswith("https:") else 80)


def is_loopback(host: str) -> bool:
    """Returns whether a host is this machine."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == _LOOPBACK


def run_of(url: str) -> str:
    """Returns the name of the run that an address ends in; empty where it names none.

    >>> run_of("https://slices.example/runs/tags"), run_of("https://slices.example")
    ('tags', '')
    """
    return urlsplit(url).path.strip("/").removeprefix("runs/")


def check_texts(texts: Iterable[str]) -> None:
    """Raises InputError where a text could be further lines of a unit, or of a script."""
    for text in texts:
        if not text.isprintable():
            raise InputError(
                f"a text that no line of a unit can hold: got {text!r} in [deploy]; expected "
                "characters that can be printed; mend it"
            )


def check_url(url: str, *, may_name_run: bool = False) -> None:
    """Raises InputError unless it is the address of a service that others can trust to be it, or
    of a run there if it may be."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        parts = urlsplit("")
    is_run = may_name_run and parts.path.startswith("/runs/") and is_run_name(run_of(url))
    is_place = parts.path in ("", "/") or is_run
    if parts.scheme not in ("http", "https") or not parts.hostname or not is_place:
        raise InputError(
            f"not the address of a service: got {url!r} in [deploy]; expected one such as "
            "https://slices.example:8100; mend it"
        )
    if parts.scheme == "http" and not is_loopback(parts.hostname):
        raise InputError(
            f"plain http beyond this machine shows everything to everyone on the way: got {url} in "
            "[deploy]; expected https; write https, and `keyhole provision` makes certificates"
        )


@dataclass(frozen=True)
class Project:
    """A folder with keyhole.toml.

    Args:
        folder: that it lies in; modules that it names are beside it.
        fields: of the run, as the file has them.
        deploy: where its parties are.
    """

    folder: Path
    fields: Mapping[str, Any]
    deploy: DeploySpec

    @staticmethod
    def open(folder: Path) -> Project:
        """Returns the project in a folder; raises InputError where its file cannot be used."""
        path = folder / FILE
        try:
            told = tomllib.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise InputError(
                f"{path} cannot be read: got {error}; expected TOML with the fields of a run and "
                "[deploy]; name the folder of a project, or make one with `keyhole new`"
            ) from error
        deploy = told.pop("deploy", {})
        return Project(folder.resolve(), told, _deploy_of(path, deploy))

    @property
    def spec(self) -> RunSpec:
        """The run, with devices that check in where a field is for those; raises InputError where
        a field is unknown or out of range."""
        told = dict(self.fields)
        if "task" not in told:
            raise InputError(
                f"{FILE} names no task: got fields {', '.join(told) or 'none'}; expected task; "
                'write task = "module:NAME"'
            )
        named, found = told.pop("task"), fields_of(FILE, told)
        if self.of_check_ins and "sampling" not in found["cohort"]:
            found["cohort"] = {**found["cohort"], "sampling": "check-in"}
        return spec_of(named, found)

    @property
    def of_check_ins(self) -> list[str]:
        """The fields of the file that only devices which check in have a use for."""
        cohort = fields_of(FILE, self.fields).get("cohort", {})
        found = [name for name in OF_CHECK_INS if cohort.get(name)]
        return [*(["sampling"] if cohort.get("sampling") == "check-in" else []), *found]

    @contextmanager
    def importable(self) -> Iterator[None]:
        """Lets modules beside the file be imported, here and in processes that are started."""
        here, known = str(self.folder), os.environ.get("PYTHONPATH")
        sys.path.insert(0, here)
        os.environ["PYTHONPATH"] = here if not known else f"{here}{os.pathsep}{known}"
        try:
            yield
        finally:
            sys.path.remove(here)
            if known is None:
                del os.environ["PYTHONPATH"]
            else:
                os.environ["PYTHONPATH"] = known

    @property
    def delivery(self) -> DeliveryAbout | None:
        """What the run's delivery declares; None for slices in the clear."""
        named = fields_of(FILE, self.fields).get("delivery")
        return None if named is None else delivery_named(named).about


def _deploy_of(path: Path, told: Any) -> DeploySpec:
    known = [field.name for field in msgspec.structs.fields(DeploySpec)]
    for name in flatten(told) if isinstance(told, Mapping) else ():
        if name.partition(".")[0] not in known:
            raise InputError(
                f"[deploy] of {path} has a field that it cannot have: got {name}; expected "
                f"{', '.join(known)}; {near_miss(name, known)}"
            )
    try:
        return msgspec.convert(told, DeploySpec)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, InputError):
            raise error.__cause__ from None
        got = str(error).replace("`$.", "`")
        raise InputError(
            f"[deploy] of {path} cannot be used: got {got}; expected the fields of "
            "docs/projects.md; mend that field"
        ) from error
