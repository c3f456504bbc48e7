"""Digests a part of a run: its code, the values it holds, and whatever of your own the code names.

`facts` says what tells a value from others, as bytes, scalars and further values. `digest_of` makes
a graph of all that can be reached so, and names each node by what it leads to. Equal values get
equal names, wherever they lie in memory and in whatever loops, and a deep nest needs no deep stack.
"""

from __future__ import annotations

import copyreg
import dis
import enum
import functools
import hashlib
import importlib
import importlib.util
import inspect
import os
import pickle
import sys
import sysconfig
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from keyhole.errors import InputError

_SCALARS = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis))
_PLAIN = (int, float, complex, str, bytes, bytearray, tuple, list, dict, set, frozenset)
_PATHS = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
_LIBRARIES = tuple(path + os.sep for path in sorted(_PATHS))
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: the class was made at run time
_SIGNATURE = (  # of the flags of code; others tell of how it was compiled
    inspect.CO_VARARGS
    | inspect.CO_VARKEYWORDS
    | inspect.CO_GENERATOR
    | inspect.CO_COROUTINE
    | inspect.CO_ASYNC_GENERATOR
    | inspect.CO_ITERABLE_COROUTINE
)
_ABOUT_CLASSES = {  # what Python notes about a class, and what only prints it
    "__annotations__",
    "__dataclass_fields__",
    "__dataclass_params__",
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


class _Bag(tuple[Any, ...]):
    """Values in no order."""


class _Node(NamedTuple):
    value: object  # kept alive: ids stay
    local: bytes
    refs: tuple[int, ...]


def digest_of(root: object, label: str) -> bytes:
    """Returns a digest that is the same for equal values, in every process.

    Args:
        label: what a reader calls it, for errors.
    """
    nodes = _graph(root, label)
    marks, count = {key: node.local for key, node in nodes.items()}, 0
    while count < (count := len(set(marks.values()))):  # until no two more are told apart
        marks = {key: _refined(node, marks[key], marks) for key, node in nodes.items()}
    return _hash([marks[id(root)], *sorted(set(marks.values()))])


def _refined(node: _Node, mark: bytes, marks: Mapping[int, bytes]) -> bytes:
    held = [marks[ref] for ref in node.refs]
    return _hash([mark, *(sorted(held) if isinstance(node.value, _Bag) else held)])


def _graph(root: object, label: str) -> dict[int, _Node]:
    """Everything that a value leads to."""
    nodes: dict[int, _Node] = {}
    todo: list[tuple[Any, str]] = [(root, label)]
    while todo:
        value, where = todo.pop()
        if id(value) in nodes:
            continue
        said, tokens, held = "", [], []
        try:
            for fact in facts(value):
                if isinstance(fact, str) and fact.isidentifier():
                    said = f".{fact}"
                tokens.append(_scalar(fact) if is_scalar(fact) else b"held")
                held += [] if is_scalar(fact) else [(fact, where + said)]
        except Exception as error:
            raise _no_identity(label, where, value) from error
        if isinstance(value, _Bag):
            tokens.sort()
        nodes[id(value)] = _Node(value, _hash(tokens), tuple(id(each) for each, _ in held))
        todo += reversed(held)
    return nodes


def facts(value: Any) -> Iterator[Any]:
    """Yields what tells a value from others: a kind, then values."""
    kind = type(value)
    if kind in _INSIDE:
        yield kind.__name__.encode()
        yield from _INSIDE[kind](value)
    elif isinstance(value, types.FunctionType):
        yield from _function(value)
    elif isinstance(value, types.ModuleType):
        yield from _module(value)
    elif isinstance(value, type):
        yield from _class(value)
    elif _is_array(value):
        yield from _array(value)
    else:
        yield from _instance(value)


def _function(function: types.FunctionType) -> Iterator[Any]:
    given = given_name(function)
    if given is not None or is_library(function):
        yield from (b"named", given if given is not None else place_of(function))
        yield from inner_values(function) if given is None else ()
        return
    yield from (b"function", function.__code__, *inner_values(function))
    yield from _pairs(vars(function))
    code = function.__code__
    for name in sorted(_loaded(code)):
        if name in function.__globals__:
            yield from _read(name, function.__globals__[name], code)
    for name, module in _imported(code, function.__globals__):
        yield from _read(name, module, code)


def inner_values(thing: Any) -> Iterator[Any]:
    """Yields what the name of a function does not say: defaults, closed-over values, and the object
    that a built-in function is bound to."""
    if isinstance(thing, types.FunctionType):
        if not is_library(thing) or "<" in thing.__code__.co_qualname:
            yield from (each for each in (thing.__defaults__, thing.__kwdefaults__) if each)
        for name, cell in zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=True):
            try:
                found = cell.cell_contents
            except ValueError:  # not yet bound
                found = None
            yield from _read(name, found, thing.__code__)
    elif isinstance(thing, types.BuiltinFunctionType):
        owner = thing.__self__
        yield from [] if owner is None or isinstance(owner, types.ModuleType) else [owner]


def _read(name: str, value: Any, code: types.CodeType) -> Iterator[Any]:
    """What code reads under a name: of your own modules, the attributes that it may mean."""
    yield name
    if isinstance(value, types.ModuleType) and not _is_library_module(value.__name__):
        yield from _attributes_read(
            value, {each for part in _codes(code) for each in part.co_names}
        )
    else:
        yield value


def _attributes_read(root: types.ModuleType, names: set[str]) -> Iterator[Any]:
    todo, met = [root], {root.__name__}
    while todo:
        module = todo.pop()
        yield b"module"
        for name in sorted(names & vars(module).keys()):
            held = vars(module)[name]
            if not isinstance(held, types.ModuleType) or _is_library_module(held.__name__):
                yield from (name, held)
            elif held.__name__ not in met:
                met.add(held.__name__)
                todo.append(held)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Code, and that of the functions and classes in it."""
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _codes(const)


def _loaded(code: types.CodeType) -> set[str]:
    """The variables of its module that code reads."""
    steps = (step for each in _codes(code) for step in dis.get_instructions(each))
    return {step.argval for step in steps if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}


def _imported(
    code: types.CodeType, variables: Mapping[str, Any]
) -> Iterator[tuple[str, types.ModuleType]]:
    """Your own modules that code imports when it runs."""
    for each in _codes(code):
        steps = list(dis.get_instructions(each))
        for at, step in enumerate(steps):
            if step.opname == "IMPORT_NAME":
                name = "." * steps[at - 2].argval + step.argval
                name = importlib.util.resolve_name(name, variables.get("__package__"))
                if not _is_library_module(name):
                    yield from _modules_of(name, steps[at - 1].argval)


def _modules_of(name: str, asked: tuple[str, ...] | None) -> Iterator[tuple[str, types.ModuleType]]:
    """What an import gives: the module, or its first package, and submodules that it asks for."""
    try:
        found = importlib.import_module(name)
        yield name, found if asked else sys.modules[name.partition(".")[0]]
    except ImportError:  # code that runs without it has met that, too
        return


def _code(code: types.CodeType) -> Iterator[Any]:
    """What is executed, without places in a file; nothing loads a docstring."""
    yield from (code.co_flags & _SIGNATURE, code.co_argcount, code.co_kwonlyargcount)
    yield from (code.co_posonlyargcount, code.co_exceptiontable)
    yield repr((code.co_varnames[: code.co_argcount + code.co_kwonlyargcount], code.co_freevars))
    for step in dis.get_instructions(code):
        yield from (step.opname.encode(), step.argval)


def _class(kind: type) -> Iterator[Any]:
    if is_library(kind):
        yield from (b"named", place_of(kind))
        return
    yield from (b"class", type(kind), *(base for base in kind.__bases__ if base is not object))
    given = _given(vars(kind))
    held = vars(kind) if given is None else {}
    slots = types.MemberDescriptorType | types.GetSetDescriptorType
    yield given
    yield from _pairs(
        {n: h for n, h in held.items() if n not in _ABOUT_CLASSES and not isinstance(h, slots)}
    )


def _is_array(value: Any) -> bool:
    kind = type(value)
    is_foreign = hasattr(kind, "__dlpack__") and not isinstance(value, np.ndarray)
    is_numpy = kind is np.ndarray or (isinstance(value, np.generic) and kind.__module__ == "numpy")
    return is_numpy or (is_foreign and is_library(kind))


def _array(value: Any) -> Iterator[Any]:
    array = np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
    yield from (b"array", type(value), str(array.dtype), str(array.shape))
    yield array.tolist() if array.dtype.hasobject else array.tobytes()


def _module(module: types.ModuleType) -> Iterator[Any]:
    """A module that is held as a value: all of it counts, as there is no telling what is read."""
    yield module.__name__
    if not _is_library_module(module.__name__):
        yield from _pairs({n: held for n, held in vars(module).items() if not n.startswith("__")})


def _instance(value: Any) -> Iterator[Any]:
    kind = type(value)
    given = given_name(value)
    yield from (b"instance", kind if given is None else given)
    if isinstance(value, enum.Enum):
        yield from (value.name, value.value)
    elif kind.__module__.startswith("numba."):
        yield from _numba(value)
    elif kind.__name__ == "PjitFunction":  # of jax.jit; the rest of its state changes with use
        state = value.__getstate__()
        yield from (state[name] for name in ("fun", "static_argnums", "static_argnames"))
    elif isinstance(value, set | frozenset):
        yield from (_Bag(value), *_pairs(_state(value)))
    elif kind.__module__.startswith("keyhole."):  # private attributes change with use
        yield from _pairs({n: held for n, held in _state(value).items() if not n.startswith("_")})
    elif "__dataclass_fields__" in _static(kind) and not isinstance(value, _PLAIN):
        yield from _pairs(_state(value))
    else:
        yield from _pickled(value)


def _numba(value: Any) -> Iterator[Any]:
    """A compiled function: what it was compiled from."""
    found = getattr(value, "_dispatcher", value)
    yield found.py_func if hasattr(found, "py_func") else found._pyfunc
    yield from _pairs(getattr(found, "targetoptions", {}))


def _state(value: Any) -> dict[str, Any]:
    """The attributes of an instance that count."""
    names = {*getattr(value, "__dict__", ()), *copyreg._slotnames(type(value))}  # type: ignore[attr-defined]
    names |= {*getattr(type(value), "__struct_fields__", ())}
    static = _static(type(value))
    listed = static.get("__dataclass_fields__", {}).values()
    names -= {each.name for each in listed if not (each.compare and each.init)}
    names -= {name for name in names if isinstance(static.get(name), functools.cached_property)}
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def _static(kind: type) -> Mapping[str, Any]:
    """The members of a class and its bases, as they were written."""
    return {name: held for base in reversed(kind.__mro__) for name, held in vars(base).items()}


def _pickled(value: Any) -> Iterator[Any]:
    kind = type(value)
    reduce = copyreg.dispatch_table.get(kind)
    reduced = value.__reduce_ex__(2) if reduce is None else reduce(value)
    if isinstance(reduced, str):
        yield from _singleton(value, reduced)
    else:
        make, args, state, *items = (*reduced, None, None)[:5]
        yield from (make, args, *(each and list(each) for each in items))
        for each in state if isinstance(state, tuple) else (state,):
            yield from _counted(kind, each) if isinstance(each, dict) else (each,)
    if any(not is_library(base) for base in kind.__mro__):
        yield from _pairs(_state(value))  # of which own hooks and base classes in C need not tell


def _counted(kind: type, state: Mapping[str, Any]) -> Iterator[Any]:
    """A state without what cached properties have computed; an empty one is none."""
    static = _static(kind)
    is_cached = (isinstance(static.get(name), functools.cached_property) for name in state)
    left = {n: held for (n, held), c in zip(state.items(), is_cached, strict=True) if not c}
    yield from _pairs(left) if left else (None,)


def _singleton(value: Any, name: str) -> Iterator[Any]:
    """What a module holds under a name, and pickles by it."""
    module = getattr(value, "__module__", None) or pickle.whichmodule(value, name)  # type: ignore[attr-defined]
    found: Any = sys.modules[module]
    for part in name.split("."):
        found = getattr(found, part)
    if found is not value:
        raise TypeError(f"{module}:{name} is another object")
    yield name


def _items(mapping: Mapping[Any, Any]) -> Iterator[Any]:
    for item in mapping.items():
        yield from item


def _pairs(named: Mapping[Any, Any]) -> Iterator[Any]:
    """Names and values, in the order of the names."""
    yield from (each for name in sorted(named, key=str) for each in (name, named[name]))


_INSIDE: dict[type, Callable[[Any], Iterable[Any]]] = {
    _Bag: iter,
    list: iter,
    tuple: iter,
    dict: _items,
    types.MappingProxyType: _items,
    set: lambda value: (_Bag(value),),
    frozenset: lambda value: (_Bag(value),),
    types.CodeType: _code,
    staticmethod: lambda value: (value.__func__,),
    classmethod: lambda value: (value.__func__,),
    functools.cached_property: lambda value: (value.func,),
    property: lambda value: (value.fget, value.fset, value.fdel),
    types.MethodType: lambda value: (value.__func__, value.__self__),
    types.BuiltinFunctionType: lambda value: (place_of(value), *inner_values(value)),
    functools.partial: lambda v: (v.func, v.args, v.keywords, *_pairs(vars(v))),
    functools._lru_cache_wrapper: lambda v: (v.__wrapped__, *_pairs(v.cache_parameters())),
    np.ufunc: lambda value: _singleton(value, value.__name__),
}


def is_scalar(value: object) -> bool:
    """Returns whether the text of a value says all of it."""
    return type(value) in _SCALARS


def _scalar(value: Any) -> bytes:
    text = value if isinstance(value, bytes) else repr(value).encode()
    return type(value).__name__.encode() + b" " + text


def _hash(tokens: Iterable[bytes]) -> bytes:
    """One digest of several texts, each with its length before it."""
    total = hashlib.sha256()
    for token in tokens:
        total.update(len(token).to_bytes(8, "little") + token)
    return total.digest()


def given_name(thing: object) -> str | None:
    """Returns the name and version that an author gave to a function, or an instance to itself."""
    if isinstance(thing, type | types.ModuleType):
        return None
    held = getattr(thing, "__dict__", {})
    given = _given(held)
    wrapped = held.get("__wrapped__")  # a wrapper copies attributes, and is no author
    return None if given is None or given == _given(getattr(wrapped, "__dict__", {})) else given


def _given(held: Mapping[str, Any]) -> str | None:
    name, version = held.get("name"), held.get("version")
    return f"{name} {version}" if isinstance(name, str) and isinstance(version, str) else None


def is_library(thing: Any) -> bool:
    """Returns whether the name of a function or class says what it is: its code is a library's."""
    if isinstance(thing, types.FunctionType):  # by where it was made: a wrapper copies names
        name = str(thing.__globals__.get("__name__"))
        is_there = vars(sys.modules.get(name, types)) is thing.__globals__
        return is_there and _is_library_module(name)
    if isinstance(thing, type):
        return _is_library_module(thing.__module__) and _is_of_its_module(thing)
    return isinstance(thing, types.BuiltinFunctionType)


def _is_of_its_module(kind: type) -> bool:
    """Whether a class was not made by other code, which can give it any module."""
    if not kind.__flags__ & _HEAP_TYPE:
        return True
    module = sys.modules.get(kind.__module__)
    found: Any = module
    for part in kind.__qualname__.split("."):
        found = getattr(found, part, None)
    is_compiled = not str(getattr(module, "__file__", None) or ".py").endswith(".py")
    return found is kind or is_compiled


def _is_library_module(name: str) -> bool:
    package = name.partition(".")[0]
    if package in ("keyhole", *sys.builtin_module_names):
        return True
    module = sys.modules.get(name) or sys.modules.get(package)
    if module is None:
        found = importlib.util.find_spec(package)
        places = [found.origin, *(found.submodule_search_locations or ())] if found else []
    else:
        places = [getattr(module, "__file__", None), *getattr(module, "__path__", ())]
    place = next((each for each in places if each), "")
    return is_library_file(place)


def is_library_file(place: str) -> bool:
    """Returns whether a file is of Python, or of what is installed."""
    return place.startswith(_LIBRARIES) or "site-packages" in Path(place).parts


def place_of(thing: Any) -> str:
    """Returns module and name of what a library defines."""
    if isinstance(thing, types.FunctionType):
        return f"{thing.__globals__['__name__']}:{thing.__code__.co_qualname}"
    module = getattr(thing, "__module__", None) or "builtins"
    return f"{module}:{getattr(thing, '__qualname__', None) or thing.__name__}"


def _no_identity(label: str, where: str, value: object) -> InputError:
    return InputError(
        f"{label} holds what has no identity: got a value of type {type(value).__qualname__} as "
        f"{where}; expected code, numbers, text, arrays, and objects that hold such; give a "
        "function `name` and `version` as text, leave the field of a data class out of ==, or make "
        "the value where it is used"
    )
