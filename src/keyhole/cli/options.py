"""Options: those of `RunSpec`, made from the record, and those that several commands share."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import click

from keyhole.errors import InputError
from keyhole.experiments.specs import DEFAULTS, defaults_of, spec_of
from keyhole.identity import Ref
from keyhole.parts import near_miss, words_for
from keyhole.rounds.fields import VERSION, SpecField, merge, nest, spec_fields
from keyhole.rounds.spec import RunSpec

SYNTHETIC = "synthetic"
FIXED = "fixed"
"""Keys drawn once per round for all clients: the word for `independent` keys that are shared."""

_Command = TypeVar("_Command", bound=Callable[..., Any])
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)

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


class NameOr(click.ParamType[str]):
    """A name that is known, in any case, or "module:NAME" of one's own.

    Args:
        names: returns those that are known; asked when an option is read or shown.
        is_open: whether it takes one's own.
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


def delivery_names() -> Sequence[str]:
    """Names of deliveries."""
    from keyhole.delivery import delivery_names

    return delivery_names()


def aggregation_names() -> Sequence[str]:
    """Names of aggregations, the default first."""
    from keyhole.aggregation import aggregation_names as names

    return names()


def _algorithm_names() -> Sequence[str]:
    from keyhole.rounds.named import ALGORITHMS

    return tuple(ALGORITHMS)


def choice_names() -> Sequence[str]:
    """Names of choices of keys, as `--keys` takes them."""
    from keyhole.keys.structured import CHOICES

    return (*CHOICES, FIXED)


def _engine_names() -> Sequence[str]:
    return "local", "ray"


_METAVARS = {int: "N", float: "X", str: "NAME", Ref: "NAME"}
_NAMES = {
    "delivery": delivery_names,
    "aggregation.name": aggregation_names,
    "client.algorithm": _algorithm_names,
    "engine": _engine_names,
    "server.optimizer": lambda: (),
    "metrics": lambda: (),
}
_SHOWN = {
    "delivery": "on-demand; broadcast where clients take every key",
    "server.optimizer": "the algorithm's",
}
_FIELDS = {field.flag: field for field in spec_fields(RunSpec) if field.flag}


def spec_options(*flags: str, **defaults: Any) -> Callable[[_Command], _Command]:
    """Adds options that set fields of the record; those that are not given are None.

    Args:
        flags: which, such as "--rounds"; all if there are none.
        defaults: name of an option -> its default, where a command has one of its own.
    """
    chosen = [_FIELDS[flag] for flag in flags] if flags else list(_FIELDS.values())

    def add(command: _Command) -> _Command:
        for field in reversed(chosen):
            command = _option(field, defaults)(command)
        return command

    return add


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
        values = [value for value in get_args(field.type) if value != "nothing"]
        return click.Choice(values) if isinstance(values[0], str) else _Whole(values)
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


class _Whole(click.Choice[int]):
    """One of a few whole numbers."""


def changes_of(context: click.Context) -> dict[str, Any]:
    """Returns what the options of a command say of the record, by dotted names."""
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


def keys_options(command: _Command) -> _Command:
    """`--keys` and `--m`."""
    command = in_group(
        KEYS,
        "--m",
        "counts",
        multiple=True,
        metavar="[SPACE=]COUNT",
        show_default="the task's",
        help="Max keys per client; `all` for every key.",
    )(command)
    return in_group(
        KEYS,
        "--keys",
        "choices",
        multiple=True,
        metavar="[SPACE=]CHOICE",
        show_default="the task's",
        help="How clients choose keys: top, random, random-top, independent, fixed (drawn once per "
        "round for all clients), all, or module:NAME. Tasks with several key spaces take "
        "SPACE=CHOICE.",
    )(command)


def size_option(command: _Command) -> _Command:
    """`--size`."""
    return in_group(
        MODEL,
        "--size",
        "sizes",
        multiple=True,
        callback=parse_pairs,
        metavar="NAME=N",
        show_default="the task's",
        help="A size of the model, such as words=50000.",
    )(command)


def spec_option(command: _Command) -> _Command:
    """`--spec`."""
    return in_group(
        MODEL,
        "--spec",
        "spec_file",
        type=_FILE,
        metavar="FILE",
        help="Read the run from a TOML file, or from the run.json of another run; options given "
        "here take precedence.",
    )(command)


def spec_from(context: click.Context, task: str | None) -> RunSpec:
    """Returns the record that a command line describes: what options say, over what the file of
    `--spec` says, over the task's defaults.
    """
    options = context.params
    told = _read_file(options.get("spec_file"))
    named = told.pop("task", None)
    named = named["name"] if isinstance(named, dict) else named
    if task is not None and named not in (None, task):
        raise click.UsageError(f"TASK is {task}, but --spec is of task {named}")
    if (task := task or named) is None:
        raise click.UsageError("pass a TASK, or --spec with one")
    usual = defaults_of(task)
    sizes = {name: _whole("--size", text) for name, text in options.get("sizes", {}).items()}
    given = {"sizes": sizes, **changes_of(context)}
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


def _keys(usual: RunSpec, options: Mapping[str, Any]) -> dict[str, Any]:
    """What `--keys` and `--m` say of the record."""
    changes: dict[str, Any] = {}
    for space, word in _by_space("--keys", usual, options.get("choices", ())).items():
        known = choice_names()
        if not Ref(word).is_own and word.lower() not in known:
            wrong = f"no {word!r}; expected {words_for(known)}; {near_miss(word, known)}"
            raise click.BadParameter(wrong, param_hint="--keys")
        choice = word if Ref(word).is_own else word.lower()
        is_fixed = choice == FIXED
        changes[f"keys.{space}.choice"] = "independent" if is_fixed else choice
        changes[f"keys.{space}.shared"] = is_fixed
        if choice == "all":
            changes[f"keys.{space}.count"] = None
    for space, text in _by_space("--m", usual, options.get("counts", ())).items():
        changes[f"keys.{space}.count"] = None if text == "all" else _whole("--m", text)
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


def _whole(flag: str, text: str) -> int:
    try:
        value = int(text.replace("_", ""))
    except ValueError:
        value = -1
    if value < 0:
        wrong = f"{text!r} is not a whole number, 0 or more"
        raise click.BadParameter(wrong, param_hint=flag)
    return value


def parse_pairs(
    _: click.Context, option: click.Parameter, values: tuple[str, ...]
) -> dict[str, str]:
    """Turns `name=value` options into a mapping; a callback of click."""
    pairs = {}
    for text in values:
        name, sign, value = text.partition("=")
        if not (name and sign and value):
            raise click.BadParameter(f"{text!r} is not NAME=VALUE", param=option)
        pairs[name] = value
    return pairs


def task_defaults() -> str:
    """Returns the defaults of every task, as a table for help."""
    head = ("task", "rounds", "cohort", "algorithm", "lr", "server", "batch", "keys")
    rows = [head, *(_row(spec) for spec in DEFAULTS.values())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        " ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return (
        "\b\nDefaults of the tasks (the last column is key space, --keys and --m):\n"
        + "\n".join(lines)
    )


def _row(spec: RunSpec) -> tuple[str, ...]:
    client = spec.client
    keys = ", ".join(
        f"{space} all" if keys.count is None else f"{space} {keys.choice} {keys.count}"
        for space, keys in spec.keys.items()
    )
    rates = f"{client.lr:g}", f"{spec.server.lr:g}"
    rounds, cohort, batch = str(spec.rounds), str(spec.cohort.size), str(client.batch_size)
    return spec.task.name, rounds, cohort, client.algorithm, *rates, batch, keys


def data_option(command: _Command) -> _Command:
    """`--data`."""
    return _shared("--data", SYNTHETIC, metavar="PATH|NAME")(command)


def seed_option(command: _Command) -> _Command:
    """`--seed`."""
    return _shared("--seed", 0)(command)


def _shared(flag: str, default: Any, **rest: Any) -> Callable[[_Command], _Command]:
    """An option of the record for commands that have a default for it."""
    field = _FIELDS[flag]
    kind = _type_of(field)
    return click.option(flag, default=default, show_default=True, type=kind, help=field.doc, **rest)


def out_option(default: str, about: str) -> Callable[[_Command], _Command]:
    """`--out`, a directory."""
    return in_group(
        PLACE,
        "--out",
        type=click.Path(file_okay=False, path_type=Path),
        default=Path(default),
        show_default=True,
        help=about,
    )


def json_option(command: _Command) -> _Command:
    """`--json`."""
    return in_group(PLACE, "--json", "as_json", is_flag=True, help="Print the results as JSON.")(
        command
    )
