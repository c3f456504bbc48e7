"""Tells whether two parts of a run are the same part, in this process or in another.

A part is what a caller plugs in: an optimizer, a choice of keys, a train function, an aggregation.
Names do not tell parts apart: all closures of one function share a name. `identity_of` follows the
code, its defaults and the values that it closes over, so a run is not resumed with another part.
"""

from __future__ import annotations

import re
import types

from keyhole.digests import digest_of, given_name, inner_values, is_library, is_scalar, place_of

_SHOWN = 16  # hexadecimal digits of a digest: 64 bits, far more than the parts of any run
_OWN = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


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


def identity_of(thing: object) -> str:
    """Returns a text that is the same for the same part, in every process, and differs for others.

    It is a name and a digest of everything that the part is made of:

    - functions: code, defaults, closed-over values, attributes, and whatever else the code names
      that is your own: variables, functions and classes, of its module or of another. Docstrings,
      comments, annotations and places in files do not count
    - instances: their class, their fields and slots, and what `pickle` takes of them: a
      `__getstate__` or `__reduce__` of your own hides no field. Fields of data classes that are
      left out of `==` or of `__init__`, and cached properties, do not count
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
