"""Tells whether two parts of a run are the same part, in this process or in another.

A part is what a caller plugs in: an optimizer, a choice of keys, a train function, an aggregation.
Names do not tell parts apart: all closures of one function share a name. `identity_of` follows the
code, its defaults and the values that it closes over, so a run is not resumed with another part.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
import re
import types
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from keyhole.digests import digest_of, given_name, inner_values, is_library, is_scalar, place_of
from keyhole.errors import InputError

_SHOWN = 16  # hexadecimal digits of a digest: 64 bits, far more than the parts of any run
_OWN = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_T = TypeVar("_T")


class Ref:
    """Names a part of a run: one that the library ships by its name, your own by "module:NAME".

    Args:
        name: of the part.
        identity: what tells your own from others of that name, as `identity_of` gives it; empty
            where the name says all, or has not been looked up.
    """

    __slots__ = ("identity", "name")

    def __init__(self, name: str, identity: str = "") -> None:
        self.name, self.identity = name, identity

    @property
    def is_own(self) -> bool:
        """Whether it is not of the library.

        >>> Ref("mine:RARE").is_own, Ref("top").is_own, Ref("/data/a:b").is_own
        (True, False, False)
        """
        return bool(self.identity) or _OWN.fullmatch(self.name) is not None

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str):
            return self.name == other
        if not isinstance(other, Ref):
            return NotImplemented
        return (self.name, self.identity) == (other.name, other.identity)

    def __hash__(self) -> int:
        return hash(self.name)

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"Ref({self.name!r}, {self.identity!r})" if self.identity else f"Ref({self.name!r})"


def pick(what: str, name: str, known: Mapping[str, _T]) -> _T:
    """Returns the part of that name, or your own that "module:NAME" names.

    Args:
        what: such as "task", for the error.
        name: in any case where it is known.
    """
    if Ref(name).is_own:
        found: _T = resolve(name)
        return found
    by_case = {each.lower(): part for each, part in known.items()}
    if name.lower() not in by_case:
        raise InputError(
            f"no such {what}: got {name!r}; expected {words_for(known)}; {near_miss(name, known)}"
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
    by_case = {each.lower(): each for each in known}
    near = difflib.get_close_matches(name.lower(), by_case, 1)
    return f"did you mean {by_case[near[0]]}?" if near else "choose one of them"


def resolve(name: str) -> Any:
    """Returns the object that "module:NAME" names; dots in NAME go into classes and objects.

    Raises:
        InputError: the text is not of this form, or there is no such module or name.

    >>> resolve("math:pi") > 3
    True
    """
    module, _, path = name.partition(":")
    if not _OWN.fullmatch(name):
        raise _unresolved(name, "not of the form module:NAME", "check the spelling")
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        near = near_miss(module, [each.name for each in pkgutil.iter_modules([str(Path.cwd())])])
        fix = near if "mean" in near else "check the spelling, or add its folder to PYTHONPATH"
        raise _unresolved(name, f"no module {error.name}", fix) from error
    except ImportError as error:
        raise _unresolved(name, str(error), "mend the module") from error
    for part in path.split("."):
        if not hasattr(found, part):
            near = near_miss(part, [each for each in dir(found) if not each.startswith("_")])
            fix = near if "mean" in near else f"check what {module} defines"
            raise _unresolved(name, f"no {part} in {module}", fix)
        found = getattr(found, part)
    return found


def identity_of(thing: object) -> str:
    """Returns a text that is the same for the same part, in every process, and differs for others.

    It is a name and a digest of everything that the part is made of:

    - functions: code, defaults, closed-over values, attributes, and whatever else the code names
      that is your own: variables, functions and classes, of its module or of another. Docstrings,
      comments, annotations and places in files do not count
    - instances: their class and their fields, or what `pickle` takes of them; fields of data
      classes that are left out of `==` or of `__init__`, and cached properties, do not count
    - arrays: dtype, shape and bytes; dictionaries: their order, too
    - what keyhole, Python and installed libraries define: the name

    An author's `name` and `version`, both text, stand for code: as attributes of a function they
    are its whole identity; as constants of a class, or attributes of an instance, they replace the
    code of that class, and the fields still count.

    Raises:
        InputError: there is no telling, as with open files, locks and generators.

    >>> def scale(factor):
    ...     return lambda x: factor * x
    >>> identity_of(scale(2)) == identity_of(scale(2))
    True
    >>> identity_of(scale(2)) == identity_of(scale(3))
    False
    >>> identity_of(max)
    'builtins:max'
    """
    if is_scalar(thing):
        return repr(thing)
    if isinstance(thing, types.FunctionType) and (given := given_name(thing)) is not None:
        return given
    if is_library(thing) and not list(inner_values(thing)):
        return place_of(thing)
    label = place_of(thing) if is_library(thing) else _label(thing)
    return f"{label} {digest_of(thing, _label(thing)).hex()[:_SHOWN]}"


def _label(thing: object) -> str:
    """What a reader calls a part: it need not tell it from others."""
    named = thing if isinstance(thing, type | types.FunctionType) else type(thing)
    return str(named.__qualname__)


def _unresolved(name: str, got: str, fix: str) -> InputError:
    return InputError(
        f"{name!r} names nothing: got {got}; expected module:NAME of a module in this folder or on "
        f"the Python path; {fix}"
    )
