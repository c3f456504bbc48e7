"""Kinds of options, sections of help, and options that several commands share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, TypeVar, get_args

import click

from keyhole.aggregation import aggregation_names
from keyhole.cli.screen import Around
from keyhole.identity import Ref
from keyhole.logs import LEVELS, LogKind, writing_logs
from keyhole.parts import near_miss, words_for

FILE = click.Path(dir_okay=False, path_type=Path)
EXISTING_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
DIRECTORY = click.Path(file_okay=False, path_type=Path)
EXISTING_DIRECTORY = click.Path(exists=True, file_okay=False, path_type=Path)

Command = TypeVar("Command", bound=Callable[..., Any])

MODEL, CLIENTS, KEYS, DELIVERY = "Model and data", "Clients", "Keys", "Delivery"
AGGREGATION, PRIVACY, ASYNCHRONOUS = "Aggregation", "Privacy", "Asynchronous rounds"
PLACE = "Where it runs"
GROUPS = (MODEL, CLIENTS, KEYS, DELIVERY, AGGREGATION, PRIVACY, ASYNCHRONOUS, PLACE)
"""Titles of the sections of help, in order."""


class GroupedOption(click.Option):
    """An option that belongs to a section of help, and perhaps to a field of the record."""

    def __init__(self, *args: Any, group: str = PLACE, path: str = "", **rest: Any) -> None:
        super().__init__(*args, **rest)
        self.group, self.path = group, path

    def get_help_extra(self, ctx: click.Context) -> click.types.OptionHelpExtra:
        """Returns the default in plain words, and its range."""
        extra = super().get_help_extra(ctx)
        if self.path == "aggregation.name":
            extra["default"] = aggregation_names()[0]
        elif isinstance(self.show_default, str):
            extra["default"] = self.show_default
        elif isinstance(self.type, NameOr) and len(self.type.names()) == 1:
            extra["default"] = self.type.names()[0]
        if not (self.required or "default" in extra or self.name == "help"):
            extra["default"] = "off" if self.is_flag else "none"
        return extra

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Returns the option, with the names that it takes."""
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
    """A command whose help lists its options by role.

    Args:
        roles: title of a section -> its options by their names, with spaces between them; without
            it each option names its own section.
    """

    def __init__(self, *args: Any, roles: Mapping[str, str] | None = None, **rest: Any) -> None:
        super().__init__(*args, **rest)
        self._titles = tuple(roles or GROUPS)
        self._role_of = {
            name: title for title, names in (roles or {}).items() for name in names.split()
        }

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes a section for each role, in order; all others come last."""
        titles = (*self._titles, "Options")
        sections: dict[str, list[tuple[str, str]]] = {title: [] for title in titles}
        order = [*self._role_of]
        params = self.get_params(context)
        params.sort(key=lambda each: order.index(each.name) if each.name in order else len(order))
        for param in params:
            is_option = isinstance(param, click.Option)
            record = param.get_help_record(context) if is_option else None
            if record is not None:
                own = getattr(param, "group", "Options")
                title = self._role_of.get(str(param.name), own)
                sections[title if title in sections else "Options"].append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def in_group(group: str, *declared: str, **rest: Any) -> Callable[[Command], Command]:
    """Returns an option in a section of help, which shows its default."""
    return click.option(*declared, cls=GroupedOption, group=group, **rest)


def option(*declared: str, **rest: Any) -> Callable[[Command], Command]:
    """Returns an option of a command whose help has no sections, or names them itself."""
    return in_group("Options", *declared, **rest)


def options_of(*each: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Returns several options as one decorator, in the order of help."""
    return lambda command: reduce(lambda made, option: option(made), reversed(each), command)


class NameOr(click.ParamType[str]):
    """A name that is known, in any case, or "module:NAME" of your own, if it is open to that.

    `names` returns those that are known; it is asked when an option is read or shown.
    """

    name = "name"

    def __init__(self, names: Callable[[], Sequence[str]], is_open: bool = True) -> None:
        self.names, self.is_open = names, is_open

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Returns the name as it is spelled; raises BadParameter where there is none."""
        if (self.is_open and Ref(value).is_own) or (param is not None and value == param.default):
            return value  # without loading what is known
        names = self.names()
        by_case = {name.lower(): name for name in names}
        if value.lower() not in by_case:
            words = words_for(names) if self.is_open else ", ".join(names)
            near = f"; {near_miss(value, names)}" if names else ""
            self.fail(f"no {value!r}; expected {words}{near}", param, ctx)
        return by_case[value.lower()]


class NumberRange(click.FloatRange):
    """A range of numbers; NaN is in none."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Returns the number; raises BadParameter where it is none, or out of range."""
        number: float = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value} is not a number in the range {self._describe_range()}", param, ctx)
        return number


class ArraysFile(click.Path):
    """The name of an .npz file."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Returns its path; raises BadParameter where it has another ending."""
        if Path(value).suffix != ".npz":
            self.fail(f"got {value}; expected a name that ends in .npz; rename it", param, ctx)
        return super().convert(value, param, ctx)


json_option = in_group(PLACE, "--json", "as_json", is_flag=True, help="Print the results as JSON.")


def out_option(default: str, about: str) -> Callable[[Command], Command]:
    """`--out`, a directory."""
    return in_group(PLACE, "--out", type=DIRECTORY, default=Path(default), help=about)


def _tracker_names() -> list[str]:
    from keyhole.experiments.trackers import TRACKERS

    return list(TRACKERS)


track_option = in_group(
    PLACE,
    "--track",
    multiple=True,
    type=NameOr(_tracker_names),
    help="Log every round with this tracker as well, below --out; may be given more than once.",
)


def log_options(level: str = "info") -> Callable[[Command], Command]:
    """Returns `--log` and `--log-level`: lines go to standard error while the command runs."""

    def begin(context: click.Context, option: click.Parameter, value: str) -> None:
        chosen = context.meta.setdefault("keyhole.log", {})
        chosen[str(option.name)] = value
        if len(chosen) == 2:  # in whichever order they were given
            log = writing_logs(chosen["log"], chosen["log_level"])
            around = context.find_object(Around)
            context.with_resource(log) if around is None else around.logs.enter_context(log)

    # Eager: what is wrong with other options is written as the log is.
    shared: dict[str, Any] = {"expose_value": False, "callback": begin, "is_eager": True}
    kinds, about = click.Choice(get_args(LogKind)), "How lines of the log are written."
    floor = "Write lines of the log from this level on."
    return options_of(
        in_group(PLACE, "--log", type=kinds, default=get_args(LogKind)[0], help=about, **shared),
        in_group(
            PLACE, "--log-level", type=click.Choice(LEVELS), default=level, help=floor, **shared
        ),
    )


def refuse(options: Mapping[str, Any], names: Iterable[str], reason: str) -> None:
    """Raises UsageError where one of the options is given: no option is passed over in silence."""
    for name in names:
        if options[name]:
            raise click.UsageError(f"--{name.replace('_', '-')} {reason}")


project_option = option(
    "--project",
    "folder",
    type=EXISTING_DIRECTORY,
    default=Path(),
    help="Folder with keyhole.toml.",
)

signing_option = option(
    "--signing-key",
    type=EXISTING_FILE,
    help="Sign manifests with this key, of `keyhole token signing-key`, for devices that pin it.",
)
