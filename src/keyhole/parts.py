"""Finds parts of a run by name, your own by "module:NAME", and checks what kind they are."""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
import sys
import traceback
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from keyhole.digests import is_library_file
from keyhole.errors import InputError, KeyholeError
from keyhole.identity import Ref

_T = TypeVar("_T")


@dataclass(frozen=True)
class PartKind:
    """Says what a part of your own must be, and which page shows how to write one.

    Args:
        what: such as "delivery".
        page: in docs/, such as "own-delivery".
        has: members that an instance must have -> what they are.
        takes: what it is called with, where it is a function.
        record: the class that it must be an instance of.
    """

    what: str
    page: str
    has: Mapping[str, Any] = field(default_factory=dict)
    takes: tuple[str, ...] = ()
    record: type = object

    def check(self, name: str, part: Any) -> None:
        """Raises InputError unless `part`, which the caller knows by `name`, is of this kind."""
        lacks = [
            each
            for each, kind in self.has.items()
            if not isinstance(getattr(part, each, None), kind)
        ]
        is_class = bool(self.has) and isinstance(part, type)
        if isinstance(part, self.record) and not (lacks or is_class) and self._can_call(part):
            return
        kind = type(part).__name__
        article = "an" if kind[0].lower() in "aeiou" else "a"
        got = f"the class {part.__name__}" if is_class else f"{article} {kind}"
        got += f" without {_listed(lacks)}" if lacks and not is_class else ""
        got += f" of {_listed(names)}" if self.takes and (names := _arguments(part)) else ""
        words = "an instance" if self.record is object else self.record.__name__
        words += f" with {_listed(self.has)}" if self.has else ""
        words = f"a function of {_listed(self.takes)}" if self.takes else words
        raise InputError(
            f"{name} is no {self.what}: got {got}; expected {words}; see docs/{self.page}.md"
        )

    def _can_call(self, part: Any) -> bool:
        """Whether it takes what it is called with, as far as Python tells."""
        try:
            if self.takes:
                inspect.signature(part).bind(*self.takes)
        except TypeError:  # not callable, or with other arguments
            return False
        except ValueError:  # written in C
            return True
        return True


def _arguments(part: Any) -> list[str]:
    """The arguments of a function of yours; none where it is no function, or written in C."""
    return list(inspect.signature(part).parameters) if inspect.isfunction(part) else []


def _listed(names: Iterable[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def pick(kind: PartKind, name: str, known: Mapping[str, _T]) -> _T:
    """Returns the part of that name, or your own that "module:NAME" names.

    Args:
        name: in any case where it is known.

    Raises:
        InputError: there is none of that name, or your own is of another kind.
    """
    if Ref(name).is_own:
        found: _T = resolve(name)
        kind.check(name, found)
        return found
    by_case = {each.lower(): part for each, part in known.items()}
    if name.lower() not in by_case:
        raise InputError(
            f"no such {kind.what}: got {name!r}; expected {words_for(known)}; "
            f"{near_miss(name, known)}"
        )
    return by_case[name.lower()]


def words_for(known: Collection[str]) -> str:
    """Returns what a name may be, for errors and help."""
    own = "module:NAME of your own"
    return ", ".join([*known, f"or {own}"]) if known else own


def near_miss(name: str, known: Iterable[str]) -> str:
    """Returns what to do about a name that is not known: the nearest one, if one is near.

    >>> near_miss("so_tga", ["so_tag", "so_word"])
    'did you mean so_tag?'
    """
    by_case = {each.lower().lstrip("-"): each for each in known}  # all options share their dashes
    near = difflib.get_close_matches(name.lower().lstrip("-"), by_case, 1)
    return f"did you mean {by_case[near[0]]}?" if near else "choose one of them"


def own_name(part: Any) -> str:
    """Returns the "module:NAME" of a part of your own, or of its class. The script that Python was
    started with goes by its file, as when it is imported.

    >>> own_name(near_miss)
    'keyhole.parts:near_miss'
    """
    named = part if hasattr(part, "__qualname__") else type(part)
    name = named.__module__
    if name in ("__main__", "__mp_main__"):
        main = sys.modules.get(name)
        spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
        name = spec.name if spec is not None else Path(file).stem if file else name
    return f"{name}:{named.__qualname__}"


def resolve(name: str) -> Any:
    """Returns the object that "module:NAME" names; dots in NAME go into classes and objects.

    An object that stands for a part, as `kh.Task` does for a task, has it as `as_part`.

    From then on modules of the working directory, where people keep their own, are found; those of
    the Python path come first.

    Raises:
        InputError: the text is not of this form, or there is no such module or name.

    >>> resolve("math:pi") > 3
    True
    """
    module, _, path = name.partition(":")
    if not Ref(name).is_own:
        raise _unresolved(name, "not of the form module:NAME", "check the spelling")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
        importlib.invalidate_caches()
    try:
        with running(f"import of {module}"):
            found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):
            fix = f"{module} imports it: install it, or mend {module}"
            raise _unresolved(name, f"no module {error.name}", fix) from error
        near = near_miss(module, [each.name for each in pkgutil.iter_modules([here])])
        fix = near if "mean" in near else "check the spelling, or add its folder to PYTHONPATH"
        raise _unresolved(name, f"no module {error.name}", fix) from error
    except ImportError as error:
        raise _unresolved(name, str(error), "mend the module") from error
    for part in path.split("."):
        if not hasattr(found, part):
            near = near_miss(part, [each for each in dir(found) if not each.startswith("_")])
            fix = near if "mean" in near else f"check what {module} defines"
            raise _unresolved(name, f"no {part} in {_file_of(module)}", fix)
        found = getattr(found, part)
    return getattr(found, "as_part", found)


def _file_of(module: str) -> str:
    """The file that a module was loaded from: another of its name may come first."""
    return getattr(sys.modules[module], "__file__", None) or module


def _unresolved(name: str, got: str, fix: str) -> InputError:
    return InputError(
        f"{name!r} names nothing: got {got}; expected module:NAME of a module in this folder or on "
        f"the Python path; {fix}"
    )


_FAILED = " has failed"


@contextmanager
def running(hook: str, where: str = "", *of: object) -> Iterator[None]:
    """Adds a note to an error of foreign code: which function of yours was run, and where.

    >>> try:
    ...     with running("train", " of client {} in round {}", 3, 5):
    ...         raise ValueError("shapes differ")
    ... except ValueError as error:
    ...     print(failed_hook(error))
    train of client 3 in round 5 has failed
    """
    try:
        yield
    except Exception as error:
        if not isinstance(error, KeyholeError) and failed_hook(error) is None:
            error.add_note(f"{hook}{where.format(*of)}{_FAILED}")
        raise


def failed_hook(error: BaseException) -> str | None:
    """Returns the note of `running`, None where there is none."""
    return next((note for note in getattr(error, "__notes__", ()) if note.endswith(_FAILED)), None)


def own_frames(error: BaseException) -> str:
    """Returns the traceback of an error without the frames of keyhole, Python and libraries."""
    here, every = str(Path(__file__).parent), traceback.extract_tb(error.__traceback__)
    frames = [each for each in every if not each.filename.startswith((here, "<"))]
    return "".join(traceback.format_list(f for f in frames if not is_library_file(f.filename)))
