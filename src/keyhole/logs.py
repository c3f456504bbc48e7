"""Writes what happens as lines of a log, as text for people or JSON for machines.

A line has a time, a level, the part that says it, an event, a sentence, and facts beside it: single
numbers and short words under the names of `FACTS`. Lists and arrays are refused, so that no key and
no update can be among them; names of devices and tokens have no place either.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from math import isfinite
from typing import Literal, TypeAlias, get_args

LogKind: TypeAlias = Literal["text", "json"]
"""How lines are written."""
LEVELS = ("debug", "info", "warning", "error")
"""The names of levels, the most talkative first."""
Fact: TypeAlias = str | int | float | bool | None

FACTS = frozenset(
    (
        "bytes",
        "bytes_down",
        "bytes_up",
        "checked_in",
        "closed",
        "cohort",
        "error",
        "goal",
        "missing",
        "party",
        "private_queries",
        "refused",
        "requests",
        "round",
        "round_id",
        "run",
        "seconds",
        "step",
        "updates",
        "waiting",
    )
)
"""The names under which facts stand beside a sentence: what a log may say of rounds."""

_MAX_WORDS = 120  # characters of a fact
_ROOT = "keyhole"


def tell(part: str, event: str, text: str, level: str = "info", /, **facts: Fact) -> None:
    """Writes one line: `event` in two or three words, `text` as a sentence, `facts` as numbers.

    Args:
        part: who says it: service, trainer, aggregator, relay, device.

    >>> import io; from contextlib import redirect_stderr
    >>> with redirect_stderr(io.StringIO()) as lines, writing_logs("json"):
    ...     tell("trainer", "round opened", "round 3 is open", round=3, cohort=12)
    >>> {k: v for k, v in json.loads(lines.getvalue()).items() if k != "time"}
    {'level': 'info', 'part': 'trainer', 'event': 'round opened', 'text': 'round 3 is open',
     'round': 3, 'cohort': 12}
    """
    assert facts.keys() <= FACTS, f"no facts of a log: {sorted(facts.keys() - FACTS)}"
    assert all(isinstance(value, get_args(Fact)) for value in facts.values())
    made = {name: _short(value) for name, value in facts.items()}
    logger = logging.getLogger(f"{_ROOT}.{part}")
    logger.log(_number(level), "%s", text, extra={"event": event, "facts": made})


def say(text: str, level: str = "info") -> None:
    """Writes a line beside the log, whatever its level: the text as it is, or an object where the
    log is JSON. It stands above progress bars, which put themselves in the place of standard error.

    >>> import io; from contextlib import redirect_stderr
    >>> with redirect_stderr(io.StringIO()) as lines:
    ...     say("metrics at http://127.0.0.1:9100/metrics")
    >>> lines.getvalue()
    'metrics at http://127.0.0.1:9100/metrics\\n'
    """
    if not is_for_machines():
        _write(text)
        return
    for line in text.splitlines():
        record = logging.LogRecord(_ROOT, _number(level), "", 0, line, None, None)
        _write(_Json().format(record))


@contextmanager
def writing_logs(kind: LogKind = "text", level: str = "info") -> Iterator[None]:
    """Lets the lines of keyhole go to standard error for as long as the context lasts."""
    logger, handler = logging.getLogger(_ROOT), _Stderr()
    handler.setFormatter(_Json() if kind == "json" else _Text())
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(_number(level))
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def is_for_machines() -> bool:
    """Returns whether lines go to standard error as JSON, so that nothing else should go there."""
    handlers = logging.getLogger(_ROOT).handlers
    return any(isinstance(handler.formatter, _Json) for handler in handlers)


def _number(level: str) -> int:
    return logging.getLevelNamesMapping()[level.upper()]


def _short(value: Fact) -> Fact:
    """JSON has no infinity, and a word is no text."""
    if isinstance(value, float):
        return value if isfinite(value) else None
    return value[:_MAX_WORDS] if isinstance(value, str) else value


class _Stderr(logging.Handler):
    """Writes to standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a line; one that nobody reads any more is dropped."""
        _write(self.format(record))


def _write(line: str) -> None:
    """Looks up standard error at each line: progress bars put themselves in its place."""
    with suppress(OSError, ValueError):
        sys.stderr.write(line + "\n")
        sys.stderr.flush()


class _Text(logging.Formatter):
    """A time, the level where it is not info, the part and the sentence."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns one line."""
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        return f"{_time(record)} {_part(record)}: {level}{_line(record)}"


class _Json(logging.Formatter):
    """An object on one line."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns one line."""
        told = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "part": _part(record),
            "event": getattr(record, "event", "note"),
            "text": _line(record),
        }
        return json.dumps(told | getattr(record, "facts", {}))


def _time(record: logging.LogRecord) -> str:
    at = datetime.fromtimestamp(record.created, UTC)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _part(record: logging.LogRecord) -> str:
    return record.name.partition(".")[2].partition(".")[0] or _ROOT


def _line(record: logging.LogRecord) -> str:
    return " ".join(record.getMessage().split())
