"""identity_of tells parts apart by what they do, in every process alike."""

import functools
import os
import subprocess
import sys
import threading
from dataclasses import dataclass, field

import jax
import numpy as np
import pytest

from keyhole.errors import InputError
from keyhole.identity import identity_of, resolve
from keyhole.keys.structured import top


def closure(factor):
    def own(x, *, shift=1):
        return factor * x + shift

    return own


def recursive(factor):
    def own(n):
        return factor if n == 0 else own(n - 1)

    return own


@dataclass(frozen=True)
class Data:
    factor: object
    seen: list = field(default_factory=list, compare=False)

    def made(self):
        return Data(self.factor)


class Plain:
    def __init__(self, factor):
        self.factor = factor

    def method(self, x):
        return Plain(self.factor * x)

    @functools.cached_property
    def computed(self):
        return self.factor * 2


def jitted(factor):
    compiled = jax.jit(closure(factor))
    return lambda x: compiled(x) + 1


MAKERS = {
    "closure": closure,
    "recursive": recursive,
    "default": lambda factor: lambda x, f=factor: f * x,
    "partial": lambda factor: functools.partial(closure, factor),
    "jitted": jitted,
    "cached": lambda factor: functools.lru_cache(closure(factor)),
    "nested": lambda factor: closure(closure(factor)),
    "data class": Data,
    "instance": Plain,
    "bound method": lambda factor: Plain(factor).method,
    "array": lambda factor: closure(np.full(3, factor, np.float32)),
    "containers": lambda factor: closure([{"a": {1, factor}, "b": (factor, None)}]),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_the_same_values_are_one_part_and_others_are_another(make):
    assert identity_of(make(2)) == identity_of(make(2))
    assert identity_of(make(2)) != identity_of(make(3))


def test_other_code_is_another_part():
    namespace = {}
    exec("def one(x):\n    return x + 1\ndef other(x):\n    return x - 1", namespace)
    one, other = namespace["one"], namespace["other"]
    one.__qualname__ = other.__qualname__ = "own"
    assert identity_of(one) != identity_of(other)


def test_a_helper_and_a_constant_of_the_module_count():
    source = (
        "RATE = {rate}\ndef helper(x):\n    return x {sign} RATE\ndef own(x):\n    return helper(x)"
    )
    found = set()
    for rate, sign in ((1, "+"), (2, "+"), (1, "-")):
        namespace = {"__name__": "own_module"}
        exec(source.format(rate=rate, sign=sign), namespace)
        found.add(identity_of(namespace["own"]))
    assert len(found) == 3


def test_what_is_computed_on_the_way_does_not_count():
    used, fresh = Plain(2), Plain(2)
    assert used.computed == 4
    data = Data(2)
    data.seen.append(1)
    assert identity_of(used) == identity_of(fresh)
    assert identity_of(data) == identity_of(Data(2))


def test_an_author_may_give_name_and_version():
    def own():
        return threading.Lock()

    own.lock = threading.Lock()
    own.name, own.version = "mine", "1"
    assert identity_of(own) == "mine 1"


def test_fields_count_beside_the_version_of_a_class():
    class Named(Plain):
        name, version = "mine", "1"

        def method(self, x):
            return x

    first = Named

    class Named(Plain):
        name, version = "mine", "1"

    assert identity_of(first(2)) == identity_of(Named(2)) != identity_of(Named(3))


def test_what_the_library_ships_goes_by_its_name():
    assert identity_of(top) == "keyhole.keys.structured:top"


@pytest.mark.parametrize(
    "value", [threading.Lock(), sys.stderr, (n for n in [1])], ids=["lock", "file", "generator"]
)
def test_what_cannot_be_digested_is_refused_and_named(value):
    with pytest.raises(InputError, match=r"closure.*no identity.*`name` and `version`"):
        identity_of(closure(value))


def test_identities_are_the_same_in_another_process():
    code = "from tests.test_identity import MAKERS, identity_of\n"
    code += "for make in MAKERS.values(): print(identity_of(make(2)))"
    command = [sys.executable, "-c", code]
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        assert done.stdout.splitlines() == [identity_of(make(2)) for make in MAKERS.values()]


def test_resolve_finds_what_is_named():
    assert resolve("keyhole.keys.structured:top") is top
    for wrong in ("top", "keyhole.keys.structured:", "keyhole.none:top", "keyhole.keys:none"):
        with pytest.raises(InputError, match="names nothing"):
            resolve(wrong)
