"""Options that set fields of `RunSpec`, made from the record, and the record that they describe."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import click

from keyhole.aggregation import aggregation_names
from keyhole.cli.options import (
    AGGREGATION,
    ASYNCHRONOUS,
    CLIENTS,
    DELIVERY,
    EXISTING_FILE,
    KEYS,
    MODEL,
    PLACE,
    PRIVACY,
    Command,
    NameOr,
    NumberRange,
    in_group,
    option,
    options_of,
)
from keyhole.delivery import delivery_names
from keyhole.errors import InputError
from keyhole.experiments.specs import DEFAULTS, SYNTHETIC, defaults_of, fields_of, spec_of
from keyhole.identity import Ref
from keyhole.rounds.fields import VERSION, SpecField, merge, nest, spec_fields
from keyhole.rounds.spec import RunSpec

FIXED = "fixed"
"""Keys drawn once per round for all clients: the word for `independent` keys that are shared."""

_GROUP_OF = {
    "cohort": CLIENTS,
    "client": CLIENTS,
    "client.negatives": KEYS,
    "cohort.seconds": PLACE,
    "delivery": DELIVERY,
    "popular": DELIVERY,
    "server": AGGREGATION,
    "aggregation": AGGREGATION,
    "mean_over": AGGREGATION,
    "privacy": PRIVACY,
    "asynchronous": ASYNCHRONOUS,
    "engine": PLACE,
}
"""Field of the record, or part of it -> section; all others are of the model."""


def _algorithm_names() -> Sequence[str]:
    from keyhole.rounds.algorithms import ALGORITHMS

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
    "server.parameters": "none",
    "best.metric": "keep none",
    "best.patience": "off",
    "cohort.seconds": "no limit; 600 with --concurrency or --sampling check-in",
    "aggregation.trim": "0.2 with trimmed-mean",
    "aggregation.untouched": "left-out",
}
_FIELDS = {field.flag: field for field in spec_fields(RunSpec) if field.flag}


def spec_options(*flags: str, **defaults: Any) -> Callable[[Command], Command]:
    """Adds options that set fields of the record, such as "--rounds"; those not given are None.

    `defaults` has the defaults of the command's own, by the name of their option.
    """
    return options_of(*(_option(_FIELDS[flag], defaults) for flag in flags))


def name_of_option(flag: str) -> str:
    """Returns the name under which click hands an option on.

    >>> name_of_option("--client-lr")
    'client_lr'
    """
    return flag.removeprefix("--").replace("-", "_")


def _option(field: SpecField, defaults: Mapping[str, Any]) -> Callable[[Command], Command]:
    part = field.path.partition(".")[0]
    group = _GROUP_OF.get(field.path, _GROUP_OF.get(part, MODEL))
    own = defaults.get(name_of_option(field.flag))
    rest: dict[str, Any] = {"default": own, "show_default": True if own else _shown(field)}
    if field.type is bool:
        rest = {"is_flag": True, "default": None, "show_default": "off"}
    else:
        rest |= {"type": _type_of(field), "metavar": _metavar(field)}
    return in_group(group, field.flag, path=field.path, help=field.doc, **rest)


def _metavar(field: SpecField) -> str | None:
    named = {"server.parameters": "GROUPS", "held_out": "FILE"}
    return named.get(field.path) or _METAVARS.get(field.type)


def _shown(field: SpecField) -> str | bool:
    """The default as help shows it."""
    if field.path in _SHOWN:
        return _SHOWN[field.path]
    if field.path.startswith(("privacy.noise", "privacy.clip", "asynchronous.concurrency")):
        return "off"
    usual = {_plain(_value(spec, field.path)) for spec in DEFAULTS.values()} - {_ABSENT}
    if len(usual) > 1 or field.is_required:
        return "the task's" if len(usual) > 1 else usual.pop()
    return _plain(field.default)


_ABSENT = "absent"


def _value(spec: RunSpec, path: str) -> Any:
    """The value of a field, where the record has its part."""
    found: Any = spec
    for name in path.split("."):
        found = getattr(found, name, _ABSENT)
    return found


def _plain(value: Any) -> str:
    if value is None or value == {}:
        return "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


class _NamedWords(click.ParamType[dict[str, str]]):
    """Names with a text each, such as word=2000,tag=0-9+12; @FILE stands for the lines of a file,
    put together with plus signs."""

    name = "NAME=KEYS,..."

    def convert(self, value: Any, param: Any, context: Any) -> dict[str, str]:
        """Returns the texts by name; fails where something is none, or a file cannot be read."""
        if isinstance(value, Mapping):
            return dict(value)
        pairs = [text.partition("=") for text in value.split(",")]
        if not all(name and words for name, _, words in pairs):
            self.fail(f"{value!r} is not NAME=KEYS, or several with commas between", param)
        return {name: self._text(words, param) for name, _, words in pairs}

    def _text(self, words: str, param: Any) -> str:
        if not words.startswith("@"):
            return words
        try:
            return "+".join(Path(words[1:]).read_text("utf-8").split())
        except (OSError, UnicodeDecodeError) as error:
            self.fail(f"{words[1:]} cannot be read: {error}", param)


class _NamedNumbers(click.ParamType[dict[str, float]]):
    """Names with a number each, such as loss=10,error=1."""

    name = "NAME=X,..."

    def convert(self, value: Any, param: Any, context: Any) -> dict[str, float]:
        """Returns the numbers by name; fails where something is neither."""
        if isinstance(value, Mapping):
            return dict(value)
        try:
            pairs = [text.split("=") for text in value.split(",")]
            return {name: float(number) for name, number in pairs}
        except ValueError:
            self.fail(f"{value!r} is not NAME=NUMBER, or several with commas between", param)


def _type_of(field: SpecField) -> Any:
    """The type of an option that takes what the field takes."""
    if field.path in _NAMES:
        return NameOr(_NAMES[field.path], is_open=field.path != "client.algorithm")
    if get_origin(field.type) is Literal:
        return click.Choice([value for value in get_args(field.type) if value != "nothing"])
    if field.type in (str, Ref):
        return str
    if get_origin(field.type) is dict:
        return _NamedWords() if get_args(field.type)[1] is str else _NamedNumbers()
    if not (bounds := field.bounds):
        return field.type
    low: Any = bounds.get("ge", bounds.get("gt"))
    high: Any = bounds.get("le", bounds.get("lt"))
    kind: Any = click.IntRange if field.type is int else NumberRange
    return kind(low, high, min_open="gt" in bounds, max_open="lt" in bounds)


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
        "round for all clients), rolling, nested, importance, tf-idf, all, or module:NAME. Tasks "
        "with several key spaces take SPACE=CHOICE.",
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
    told.pop("deploy", None)  # of a project: where its parties are
    named = told.pop("task", None)
    named = named["name"] if isinstance(named, dict) else named
    if task is not None and named not in (None, task):
        raise click.UsageError(f"TASK is {task}, but --spec is of task {named}")
    if (task := task or named) is None:
        raise click.UsageError("pass a TASK, or --spec with one")
    told = fields_of(f"--spec {options['spec_file']}", told)
    usual = defaults_of(task)
    given = {"sizes": options["sizes"], **_changes(context)}
    return spec_of(task, merge(told, nest({**given, **_keys(usual, options)})))


def _read_file(path: Path | None) -> dict[str, Any]:
    """What a TOML file, or a run.json, says."""
    if path is None:
        return {}
    try:
        text = path.read_text()
        told = json.loads(text)["spec"] if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(
            f"--spec {path} cannot be read: got {error}; expected TOML with fields of a run, or "
            "the run.json of a run; check the file"
        ) from error
    if told.get("version", VERSION) != VERSION:
        raise InputError(
            f"--spec {path} is of another version: got version {told['version']}; expected "
            f"{VERSION}; use the version of keyhole that wrote it, or write it again"
        )
    return dict(told)


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


def _whole(flag: str, text: str, minimum: int = 0) -> int:
    try:
        value = int(text.replace("_", ""))
    except ValueError:
        value = -1
    if value < minimum:
        wrong = f"{text!r} is not a whole number, {minimum} or more"
        raise click.BadParameter(wrong, param_hint=flag)
    return value


def _shared(flag: str, default: Any, **rest: Any) -> Callable[[Command], Command]:
    """An option of the record for commands that have a default for it."""
    field = _FIELDS[flag]
    return option(flag, default=default, type=_type_of(field), help=field.doc, **rest)


data_option = _shared("--data", SYNTHETIC, metavar="PATH|NAME")
seed_option = _shared("--seed", 0)
