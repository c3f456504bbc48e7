"""Tells whether two parts of a run are the same part, in this process or in another.

A part is what a caller plugs in: an optimizer, a choice of keys, a train function, an aggregation.
Names do not tell parts apart: all closures of one function share a name. `identity_of` follows the
code, its defaults and the values that it closes over, so a run is not resumed with another part.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import functools
import hashlib
import importlib
import inspect
import pkgutil
import re
import sys
import sysconfig
import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, TypeVar

import numpy as np

from keyhole.errors import InputError

_SHOWN = 16  # hexadecimal digits of a digest: 64 bits, far more than the parts of any run
_SCALARS = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis), np.generic)
_LIBRARIES = tuple(
    sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
_ABOUT_CLASSES = {  # what Python notes about a class, and what only prints it
    "__annotations__",
    "__dict__",
    "__doc__",
    "__firstlineno__",
    "__hash__",
    "__match_args__",
    "__module__",
    "__orig_bases__",
    "__parameters__",
    "__qualname__",
    "__repr__",
    "__slotnames__",
    "__slots__",
    "__static_attributes__",
    "__str__",
    "__weakref__",
    "__abstractmethods__",
    "_abc_impl",
}


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

    Where `thing` has attributes `name` and `version`, both text, they are its identity. As
    constants of a class they stand for its code; what differs between its instances still counts.
    Otherwise the identity is a name and a digest of:

    - functions: code, defaults, closed-over values, and the functions, classes and upper-case
      constants of their own module that the code names; a compiled or cached function counts as
      the one that it wraps
    - instances: their class and their fields, or what `pickle` takes of them; fields of data
      classes that are left out of `==` or of `__init__`, and cached properties, do not count
    - arrays: dtype, shape and bytes
    - modules, and what keyhole, Python and installed libraries define: the name

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
    if isinstance(thing, _SCALARS):
        return repr(thing)
    given = _given(thing)
    if given is not None:
        return given
    digest = _Walk(_label(thing)).digest(thing).hex()[:_SHOWN]
    if _is_named(thing) and not list(_inner_values(thing)):
        return _place(thing)
    label = _place(thing) if _is_named(thing) else _label(thing)
    return f"{label} {digest}"


@dataclass
class _Walk:
    """Digests a value and all that it holds; remembers what it has met."""

    label: str
    _depths: dict[int, int] = field(default_factory=dict)  # of what is being digested now
    _done: dict[int, tuple[object, bytes]] = field(default_factory=dict)  # kept alive: ids stay
    _loops: int = 0

    def digest(self, value: Any) -> bytes:
        if isinstance(value, _SCALARS):
            return _hash([type(value).__name__.encode(), repr(value).encode()])
        if id(value) in self._done:
            return self._done[id(value)][1]
        if id(value) in self._depths:
            self._loops += 1
            return _hash([b"loop", str(len(self._depths) - self._depths[id(value)]).encode()])
        loops = self._loops
        self._depths[id(value)] = len(self._depths)
        found = _hash(self._tokens(value))
        del self._depths[id(value)]
        if loops == self._loops:  # inside a loop, the digest depends on where one came from
            self._done[id(value)] = value, found
        return found

    def _tokens(self, value: Any) -> Iterator[bytes]:
        """Yields what tells a value from others: a kind, then bytes or digests."""
        given = _given(value)
        if given is not None:
            yield from (b"given", given.encode())
        elif isinstance(value, np.ndarray) or hasattr(value, "__array__"):
            yield from self._array(value)
        elif isinstance(value, types.CodeType):
            yield from self._code(value)
        elif _is_named(value):
            yield from (b"named", _place(value).encode(), *map(self.digest, _inner_values(value)))
        elif isinstance(value, types.FunctionType):
            yield from (b"function", *self._code(value.__code__, value.__doc__))
            yield from map(self.digest, _inner_values(value))
            yield from map(self.digest, _globals_of(value))
        elif isinstance(value, type):
            yield from self._class(value)
        else:
            yield from self._inside(value)

    def _array(self, value: Any) -> Iterator[bytes]:
        array = np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
        yield from (b"array", str(array.dtype).encode(), str(array.shape).encode())
        yield self.digest(array.tolist()) if array.dtype.hasobject else array.tobytes()

    def _code(self, code: types.CodeType, doc: str | None = None) -> Iterator[bytes]:
        """Bytes of compiled code without places in a file, and without the docstring."""
        names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        yield from (code.co_code, repr(names).encode(), code.co_exceptiontable)
        consts = code.co_consts
        is_doc = doc is not None and consts and consts[0] == doc
        yield from map(self.digest, consts[1:] if is_doc else consts)

    def _class(self, value: type) -> Iterator[bytes]:
        yield b"class"
        yield from (self.digest(base) for base in value.__bases__ if base is not object)
        given = _class_given(value)
        if given is not None:
            yield given.encode()
            return
        for name, held in sorted(vars(value).items()):
            if name not in _ABOUT_CLASSES and not _is_generated(name, held):
                yield from (name.encode(), self.digest(held))

    def _inside(self, value: Any) -> Iterator[bytes]:
        """Containers and instances: what they hold."""
        if isinstance(value, staticmethod | classmethod | functools.cached_property):
            held: Iterable[Any] = [getattr(value, "__func__", getattr(value, "func", None))]
        elif isinstance(value, property):
            held = [value.fget, value.fset]
        elif isinstance(value, types.ModuleType):
            held = [value.__name__]
        elif isinstance(value, types.MethodType):
            held = [value.__func__, value.__self__]
        elif isinstance(value, functools.partial):
            held = [value.func, value.args, value.keywords]
        elif isinstance(value, enum.Enum):
            held = [type(value), value.name]
        elif isinstance(value, PurePath):
            held = [str(value)]
        elif hasattr(value, "__wrapped__"):
            held = [value.__wrapped__]
        else:
            yield from self._contents(value)
            return
        yield type(value).__name__.encode()
        yield from map(self.digest, held)

    def _contents(self, value: Any) -> Iterator[bytes]:
        yield self.digest(type(value))
        if isinstance(value, set | frozenset):
            yield from sorted(map(self.digest, value))
        elif isinstance(value, tuple | list):
            yield from map(self.digest, value)
        elif isinstance(value, Mapping) and type(value).__module__ in _PLAIN_MODULES:
            yield from sorted(_hash([self.digest(k), self.digest(v)]) for k, v in value.items())
        elif dataclasses.is_dataclass(value):
            for f in dataclasses.fields(value):
                if f.compare and f.init:
                    yield from (f.name.encode(), self.digest(getattr(value, f.name)))
        else:
            yield from self._pickled(value)

    def _pickled(self, value: Any) -> Iterator[bytes]:
        if type(value).__module__.startswith("keyhole."):  # private attributes change with use
            listed = (getattr(value, name, None) for name in ("__struct_fields__", "__slots__"))
            held = next((names for names in listed if names), None) or vars(value)
            public = [name for name in held if not name.startswith("_")]
            yield from map(self.digest, [(name, getattr(value, name)) for name in sorted(public)])
            return
        try:
            reduced = value.__reduce_ex__(2)
        except Exception as error:
            raise InputError(
                f"{self.label} holds what has no identity: got a value of type "
                f"{type(value).__qualname__}; expected code, numbers, text, arrays, and objects "
                "that hold such; give it `name` and `version` as text, or make the value where it "
                "is used"
            ) from error
        if isinstance(reduced, str):
            yield from (b"global", reduced.encode())
            return
        make, args, state, *items = (*reduced, None, None)[:5]
        if isinstance(state, dict):
            state = {name: held for name, held in state.items() if not _is_cached(value, name)}
        yield from map(self.digest, (make, args, state, *(i and list(i) for i in items)))


_PLAIN_MODULES = ("builtins", "collections", "types")


def _hash(tokens: Iterable[bytes]) -> bytes:
    """One digest of several texts, each with its length before it."""
    total = hashlib.sha256()
    for token in tokens:
        total.update(len(token).to_bytes(8, "little") + token)
    return total.digest()


def _given(thing: object) -> str | None:
    """The name and version that an author gave to a function, or an instance to itself."""
    if isinstance(thing, type | types.ModuleType) or _class_given(type(thing)) is not None:
        return None
    name = inspect.getattr_static(thing, "name", None)
    version = inspect.getattr_static(thing, "version", None)
    if name is None or version is None:
        return None
    name, version = thing.name, thing.version  # type: ignore[attr-defined]
    return f"{name} {version}" if isinstance(name, str) and isinstance(version, str) else None


def _class_given(kind: type) -> str | None:
    """The name and version that a class, or one that it derives from, has as constants."""
    name = inspect.getattr_static(kind, "name", None)
    version = inspect.getattr_static(kind, "version", None)
    return f"{name} {version}" if isinstance(name, str) and isinstance(version, str) else None


def _is_named(thing: Any) -> bool:
    """Whether the name of a function or class says what it is: its code is a library's."""
    if not isinstance(thing, type | types.FunctionType | types.BuiltinFunctionType | np.ufunc):
        return False
    module = getattr(thing, "__module__", None) or "builtins"
    package = module.partition(".")[0]
    if package == "builtins" and isinstance(thing, types.FunctionType):
        return False  # made by exec
    if package in ("keyhole", "builtins", "numpy") or package in sys.builtin_module_names:
        return True
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is not None and file.startswith(_LIBRARIES)


def _place(thing: Any) -> str:
    """Module and name of what a library defines."""
    module = getattr(thing, "__module__", None) or "builtins"
    return f"{module}:{getattr(thing, '__qualname__', None) or thing.__name__}"


def _label(thing: object) -> str:
    """What a reader calls a part: it need not tell it from others."""
    named = thing if hasattr(thing, "__qualname__") else type(thing)
    return str(getattr(named, "__qualname__", type(thing).__qualname__))


def _inner_values(function: Any) -> Iterator[Any]:
    """Defaults, closed-over values and the object of a bound built-in."""
    if isinstance(function, types.FunctionType):
        if not _is_named(function) or "<" in function.__qualname__:  # else the name says them
            yield from (d for d in (function.__defaults__, function.__kwdefaults__) if d)
        for cell in function.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # not yet bound
                yield None
    elif isinstance(function, types.BuiltinFunctionType):
        owner = function.__self__
        yield from [] if owner is None or isinstance(owner, types.ModuleType) else [owner]


def _globals_of(function: types.FunctionType) -> Iterator[Any]:
    """Helpers and constants of its module that a function names, itself left out."""
    for name in sorted(set(_names(function.__code__))):
        value = function.__globals__.get(name)
        if value is function:
            continue
        is_code = isinstance(value, type | types.FunctionType)
        is_own = is_code and value.__module__ == function.__module__
        if is_own or (name.isupper() and isinstance(value, (*_SCALARS, tuple, np.ndarray))):
            yield name
            yield value


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _names(const)


def _is_cached(value: object, name: str) -> bool:
    """Whether an attribute holds what a cached property has computed."""
    return isinstance(getattr(type(value), name, None), functools.cached_property)


def _is_generated(name: str, held: object) -> bool:
    """Whether Python made this member of a class from others."""
    if name.startswith("__dataclass_"):
        return True
    if isinstance(held, types.FunctionType):
        return held.__code__.co_filename == "<string>"
    return inspect.isdatadescriptor(held) and not isinstance(held, property)


def _unresolved(name: str, got: str, fix: str) -> InputError:
    return InputError(
        f"{name!r} names nothing: got {got}; expected module:NAME of a module in this folder or on "
        f"the Python path; {fix}"
    )
