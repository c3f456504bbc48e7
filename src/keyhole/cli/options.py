"""Options: those of `RunSpec`, made from the record, and those that several commands share."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin

import click

from keyhole.aggregation import aggregation_names
from keyhole.delivery import delivery_names
from keyhole.errors import InputError
from keyhole.experiments.specs import DEFAULTS, defaults_of, spec_of
from keyhole.identity import Ref
from keyhole.parts import near_miss, words_for
from keyhole.rounds.fields import VERSION, SpecField, flatten, merge, nest, spec_fields
from keyhole.rounds.spec import RunSpec

if TYPE_CHECKING:
    from keyhole.service.access import DenyList
    from keyhole.service.transport import Listen

SYNTHETIC = "synthetic"
FIXED = "fixed"
"""Keys drawn once per round for all clients: the word for `independent` keys that are shared."""

FILE = click.Path(dir_okay=False, path_type=Path)
EXISTING_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
DIRECTORY = click.Path(file_okay=False, path_type=Path)
EXISTING_DIRECTORY = click.Path(exists=True, file_okay=False, path_type=Path)

_Command = TypeVar("_Command", bound=Callable[..., Any])

MODEL, CLIENTS, KEYS, DELIVERY = "Model and data", "Clients", "Keys", "Delivery"
AGGREGATION, PRIVACY, ASYNCHRONOUS = "Aggregation", "Privacy", "Asynchronous rounds"
PLACE = "Where it runs"
GROUPS = (MODEL, CLIENTS, KEYS, DELIVERY, AGGREGATION, PRIVACY, ASYNCHRONOUS, PLACE)
"""Titles of the sections of help, in order."""

_GROUP_OF = {
    "cohort": CLIENTS,
    "client": CLIENTS,
    "client.negatives": KEYS,
    "delivery": DELIVERY,
    "server": AGGREGATION,
    "aggregation": AGGREGATION,
    "mean_over": AGGREGATION,
    "privacy": PRIVACY,
    "asynchronous": ASYNCHRONOUS,
    "engine": PLACE,
}
"""Field of the record, or part of it -> section; all others are of the model."""


class GroupedOption(click.Option):
    """An option that belongs to a section of help, and perhaps to a field of the record."""

    def __init__(self, *args: Any, group: str = PLACE, path: str = "", **rest: Any) -> None:
        super().__init__(*args, **rest)
        self.group, self.path = group, path

    def get_help_extra(self, ctx: click.Context) -> click.types.OptionHelpExtra:
        """The default in plain words, and its range."""
        extra = super().get_help_extra(ctx)
        if self.path == "aggregation.name":
            extra["default"] = aggregation_names()[0]
        elif isinstance(self.show_default, str):
            extra["default"] = self.show_default
        elif isinstance(self.type, NameOr) and len(self.type.names()) == 1:
            extra["default"] = self.type.names()[0]
        return extra

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """The option, with the names that it takes."""
        record = super().get_help_record(ctx)
        if record is None or not isinstance(self.type, NameOr):
            return record
        flag, text = record
        if not self.type.names():
            return record
        about, sign, extra = text.rpartition("  [") if "  [" in text else (text, "", "")
        own = ", or module:NAME" if self.type.is_open else ""
        return flag, f"{about} One of {', '.join(self.type.names())}{own}.{sign}{extra}"


class GroupedCommand(click.Command):
    """A command whose help lists its options by role."""

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes a section for each role, in order; all others come last."""
        sections: dict[str, list[tuple[str, str]]] = {title: [] for title in (*GROUPS, "Options")}
        for param in self.get_params(context):
            is_option = isinstance(param, click.Option)
            record = param.get_help_record(context) if is_option else None
            if record is not None:
                sections[getattr(param, "group", "Options")].append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def in_group(group: str, *declared: str, **rest: Any) -> Callable[[_Command], _Command]:
    """An option in a section of help."""
    return click.option(*declared, cls=GroupedOption, group=group, **rest)


def options_of(*each: Callable[[_Command], _Command]) -> Callable[[_Command], _Command]:
    """Several options as one decorator, in the order of help."""
    return lambda command: reduce(lambda made, option: option(made), reversed(each), command)


class NameOr(click.ParamType[str]):
    """A name that is known, in any case, or "module:NAME" of one's own, where it is open to that.

    `names` returns those that are known; it is asked when an option is read or shown.
    """

    name = "name"

    def __init__(self, names: Callable[[], Sequence[str]], is_open: bool = True) -> None:
        self.names, self.is_open = names, is_open

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The name as it is spelled; raises BadParameter where there is none."""
        if (self.is_open and Ref(value).is_own) or (param is not None and value == param.default):
            return value  # without loading what is known
        names = self.names()
        by_case = {name.lower(): name for name in names}
        if value.lower() not in by_case:
            words = words_for(names) if self.is_open else ", ".join(names)
            near = f"; {near_miss(value, names)}" if names else ""
            self.fail(f"no {value!r}; expected {words}{near}", param, ctx)
        return by_case[value.lower()]


def _algorithm_names() -> Sequence[str]:
    from keyhole.rounds.named import ALGORITHMS

    return tuple(ALGORITHMS)


_METAVARS = {int: "N", float: "X", str: "NAME", Ref: "NAME"}
_NAMES = {
    "delivery": delivery_names,
    "aggregation.name": aggregation_names,
    "client.algorithm": _algorithm_names,
    "engine": lambda: ("local", "ray"),
    "server.optimizer": lambda: (),
    "metrics": lambda: (),
}
_SHOWN = {
    "delivery": "on-demand; broadcast where clients take every key",
    "server.optimizer": "the algorithm's",
}
_FIELDS = {field.flag: field for field in spec_fields(RunSpec) if field.flag}


def spec_options(*flags: str, **defaults: Any) -> Callable[[_Command], _Command]:
    """Adds options that set fields of the record, such as "--rounds"; those not given are None.

    `defaults` has the defaults of the command's own, by the name of their option.
    """
    return options_of(*(_option(_FIELDS[flag], defaults) for flag in flags))


def name_of_option(flag: str) -> str:
    """The name under which click hands an option on.

    >>> name_of_option("--client-lr")
    'client_lr'
    """
    return flag.removeprefix("--").replace("-", "_")


def _option(field: SpecField, defaults: Mapping[str, Any]) -> Callable[[_Command], _Command]:
    part = field.path.partition(".")[0]
    group = _GROUP_OF.get(field.path, _GROUP_OF.get(part, MODEL))
    own = defaults.get(name_of_option(field.flag))
    rest: dict[str, Any] = {"default": own, "show_default": True if own else _shown(field)}
    if field.type is bool:
        rest = {"is_flag": True, "default": None, "show_default": "off"}
    else:
        rest |= {"type": _type_of(field), "metavar": _METAVARS.get(field.type)}
    return in_group(group, field.flag, path=field.path, help=field.doc, **rest)


def _shown(field: SpecField) -> str | bool:
    """The default as help shows it."""
    if field.path in _SHOWN:
        return _SHOWN[field.path]
    if field.path.startswith(("privacy.noise", "privacy.clip", "asynchronous.concurrency")):
        return "off"
    usual = {_value(spec, field.path) for spec in DEFAULTS.values()} - {_ABSENT}
    if len(usual) > 1 or field.is_required:
        return "the task's" if len(usual) > 1 else _plain(usual.pop())
    return _plain(field.default)


_ABSENT = object()


def _value(spec: RunSpec, path: str) -> Any:
    """The value of a field, where the record has its part."""
    found: Any = spec
    for name in path.split("."):
        found = getattr(found, name, _ABSENT)
    return found


def _plain(value: Any) -> str:
    if value is None:
        return "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _type_of(field: SpecField) -> Any:
    """The type of an option that takes what the field takes."""
    if field.path in _NAMES:
        return NameOr(_NAMES[field.path], is_open=field.path != "client.algorithm")
    if get_origin(field.type) is Literal:
        return click.Choice([value for value in get_args(field.type) if value != "nothing"])
    if field.type in (str, Ref):
        return str
    if not (bounds := field.bounds):
        return field.type
    low: Any = bounds.get("ge", bounds.get("gt"))
    high: Any = bounds.get("le", bounds.get("lt"))
    kind: Any = click.IntRange if field.type is int else NumberRange
    return kind(low, high, min_open="gt" in bounds, max_open="lt" in bounds)


class NumberRange(click.FloatRange):
    """A range of numbers; NaN is in none."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """The number; raises BadParameter where it is none, or out of range."""
        number: float = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value} is not a number in the range {self._describe_range()}", param, ctx)
        return number


def _changes(context: click.Context) -> dict[str, Any]:
    """What the options of a command say of the record, by dotted names."""
    given: dict[str, Any] = {}
    for param in context.command.params:
        path = getattr(param, "path", "")
        value = context.params.get(param.name or "")
        if path and value is not None:
            given[path] = value
    if given.get("aggregation.name") == aggregation_names()[0]:
        del given["aggregation.name"]
    if given.get("privacy.kind") == "correlated":
        given["privacy.rounds"] = given.get("rounds", 0)
    return given


keys_options = options_of(
    in_group(
        KEYS,
        "--keys",
        "choices",
        multiple=True,
        metavar="[SPACE=]CHOICE",
        show_default="the task's",
        help="How clients choose keys: top, random, random-top, independent, fixed (drawn once per "
        "round for all clients), all, or module:NAME. Tasks with several key spaces take "
        "SPACE=CHOICE.",
    ),
    in_group(
        KEYS,
        "--m",
        "counts",
        multiple=True,
        metavar="[SPACE=]COUNT",
        show_default="the task's",
        help="Max keys per client; `all` for every key.",
    ),
)


def _parse_sizes(
    _: click.Context, option: click.Parameter, values: tuple[str, ...]
) -> dict[str, int]:
    sizes = {}
    for text in values:
        name, sign, value = text.partition("=")
        if not (name and sign and value):
            raise click.BadParameter(f"{text!r} is not NAME=VALUE", param=option)
        sizes[name] = _whole("--size", value)
    return sizes


run_options = options_of(
    in_group(
        MODEL,
        "--spec",
        "spec_file",
        type=EXISTING_FILE,
        metavar="FILE",
        help="Read the run from a TOML file, or from the run.json of another run; options given "
        "here take precedence.",
    ),
    in_group(
        MODEL,
        "--size",
        "sizes",
        multiple=True,
        callback=_parse_sizes,
        metavar="NAME=N",
        show_default="the task's",
        help="A size of the model, such as words=50000.",
    ),
)


def spec_from(context: click.Context, task: str | None) -> RunSpec:
    """Returns the record that a command line describes: what options say, over what the file of
    `--spec` says, over the task's defaults.
    """
    options = context.params
    told = _read_file(options["spec_file"])
    named = told.pop("task", None)
    named = named["name"] if isinstance(named, dict) else named
    if task is not None and named not in (None, task):
        raise click.UsageError(f"TASK is {task}, but --spec is of task {named}")
    if (task := task or named) is None:
        raise click.UsageError("pass a TASK, or --spec with one")
    _check_names(options["spec_file"], nest(told))
    usual = defaults_of(task)
    given = {"sizes": options["sizes"], **_changes(context)}
    return spec_of(task, merge(nest(told), nest({**given, **_keys(usual, options)})))


def _read_file(path: Path | None) -> dict[str, Any]:
    """What a TOML file, or a run.json, says."""
    if path is None:
        return {}
    try:
        text = path.read_text()
        told = json.loads(text)["spec"] if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"--spec {path} cannot be read: got {error}; expected TOML with fields of a run, or "
            "the run.json of a run; check the file"
        ) from error
    if told.get("version", VERSION) != VERSION:
        raise InputError(
            f"--spec {path} is of another version: got version {told['version']}; expected "
            f"{VERSION}; use the version of keyhole that wrote it, or write it anew"
        )
    return dict(told)


def _check_names(path: Path | None, told: Mapping[str, Any]) -> None:
    """Raises InputError where a file has a field that no run has."""
    known = [field.path for field in spec_fields(RunSpec)]
    for name in flatten(told):
        if not any(f"{name}.".startswith(f"{k}.") or k.startswith(f"{name}.") for k in known):
            raise InputError(
                f"--spec {path} has a field that no run has: got {name}; expected one of run.json; "
                f"{near_miss(name, known)}"
            )


def _keys(usual: RunSpec, options: Mapping[str, Any]) -> dict[str, Any]:
    """What `--keys` and `--m` say of the record."""
    from keyhole.keys.structured import CHOICES

    changes: dict[str, Any] = {}
    known = NameOr(lambda: (*CHOICES, FIXED))
    for space, word in _by_space("--keys", usual, options["choices"]).items():
        try:
            choice = known.convert(word, None, None)
        except click.BadParameter as error:
            raise click.BadParameter(error.message, param_hint="--keys") from None
        is_fixed = choice == FIXED
        changes[f"keys.{space}.choice"] = "independent" if is_fixed else choice
        changes[f"keys.{space}.shared"] = is_fixed
        if choice == "all":
            changes[f"keys.{space}.count"] = None
    for space, text in _by_space("--m", usual, options["counts"]).items():
        changes[f"keys.{space}.count"] = None if text == "all" else _whole("--m", text, 1)
    return changes


def _by_space(flag: str, usual: RunSpec, texts: Iterable[str]) -> dict[str, str]:
    """`SPACE=VALUE`, or a value alone where the task has one key space."""
    found, spaces = {}, list(usual.keys)
    for text in texts:
        space, sign, value = text.rpartition("=")
        if not sign and len(spaces) > 1:
            named = ", ".join(f"{name}={text}" for name in spaces)
            wrong = f"task {usual.task} has several key spaces: say {named}"
            raise click.BadParameter(wrong, param_hint=flag)
        if sign and space not in spaces:
            wrong = f"task {usual.task} has no key space {space!r}; expected {', '.join(spaces)}"
            raise click.BadParameter(wrong, param_hint=flag)
        found[space if sign else spaces[0]] = value
    return found


def _whole(flag: str, text: str, least: int = 0) -> int:
    try:
        value = int(text.replace("_", ""))
    except ValueError:
        value = -1
    if value < least:
        wrong = f"{text!r} is not a whole number, {least} or more"
        raise click.BadParameter(wrong, param_hint=flag)
    return value


def _shared(flag: str, default: Any, **rest: Any) -> Callable[[_Command], _Command]:
    """An option of the record for commands that have a default for it."""
    field = _FIELDS[flag]
    return click.option(flag, default=default, type=_type_of(field), help=field.doc, **rest)


data_option = _shared("--data", SYNTHETIC, metavar="PATH|NAME")
seed_option = _shared("--seed", 0)
json_option = in_group(PLACE, "--json", "as_json", is_flag=True, help="Print the results as JSON.")


def out_option(default: str, about: str) -> Callable[[_Command], _Command]:
    """`--out`, a directory."""
    return in_group(PLACE, "--out", type=DIRECTORY, default=Path(default), help=about)


def listen_options(port: int) -> Callable[[_Command], _Command]:
    """Where a service listens, with a port of the command's own."""
    free = "Port to listen at; 0 takes any that is free."
    chain = "Certificate chain, PEM; without it plain HTTP."
    signed = "Demand client certificates signed by this, PEM."
    return options_of(
        click.option("--host", default="127.0.0.1", help="Address to listen at."),
        click.option("--port", default=port, type=click.IntRange(0, 65535), help=free),
        click.option("--tls-cert", type=EXISTING_FILE, help=chain),
        click.option(
            "--tls-key", type=EXISTING_FILE, help="Its key, PEM; if it is not in the same file."
        ),
        click.option("--client-ca", type=EXISTING_FILE, help=signed),
        click.option(
            "--insecure", is_flag=True, help="Allow plain HTTP beyond this machine, both ways."
        ),
        click.option(
            "--metrics-listen",
            metavar="HOST:PORT",
            callback=_metrics_listen,
            show_default="a free port of 127.0.0.1",
            help="Where /metrics is shown, in plain HTTP: never at the port of devices.",
        ),
    )


deny_option = click.option(
    "--deny",
    type=EXISTING_FILE,
    help="Ids of tokens that count no more, as `keyhole token deny` writes them; read again when "
    "it changes.",
)


def _metrics_listen(_: click.Context, option: click.Parameter, text: str | None) -> Listen | None:
    """Where metrics are shown; an address that is named is meant."""
    from keyhole.service.transport import Listen

    if text is None:
        return None
    host, _sign, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise click.BadParameter(f"{text!r} is not HOST:PORT", param=option)
    return Listen(host.strip("[]"), int(port), insecure=True)


def deny_list_of(options: Mapping[str, Any]) -> DenyList | None:
    """The list that `--deny` names."""
    from keyhole.service.access import DenyList

    return None if options["deny"] is None else DenyList(options["deny"])


def listen_of(options: Mapping[str, Any]) -> Listen:
    """What `listen_options` say."""
    from keyhole.service.transport import Listen

    names = "host", "port", "tls_cert", "tls_key", "client_ca", "insecure"
    return Listen(*(options[name] for name in names))


def refuse(options: Mapping[str, Any], names: Iterable[str], reason: str) -> None:
    """Raises UsageError where one of the options is given: no option is passed over in silence."""
    for name in names:
        if options[name]:
            raise click.UsageError(f"--{name.replace('_', '-')} {reason}")


signing_option = click.option(
    "--signing-key",
    type=EXISTING_FILE,
    help="Sign manifests with this key, of `keyhole token signing-key`, for devices that pin it.",
)
