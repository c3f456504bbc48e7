"""identity_of tells parts apart by what they do, in every process alike."""

import functools
import os
import re
import subprocess
import sys
import threading
import types
from dataclasses import dataclass, field

import jax
import numpy as np
import pytest

from keyhole.errors import InputError
from keyhole.identity import identity_of
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


class OnlyCached:
    @functools.cached_property
    def computed(self):
        return 4


def jitted(factor):
    compiled = jax.jit(closure(factor))
    return lambda x: compiled(x) + 1


LOCK = threading.Lock()

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
    "pattern": lambda factor: closure(re.compile("a" * factor)),
    "strings": lambda factor: closure(frozenset({"a", "b", "c", str(factor)})),
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


OWN = {  # source -> what the part is called there; {} is what differs
    "variable": "rate = {}\ndef own(x): return rate * x",
    "dictionary": "Rates = {{'a': {}}}\ndef own(x): return Rates['a'] * x",
    "instance": "import types\nK = types.SimpleNamespace(k={})\ndef own(x): return K.k * x",
    "compiled": "import jax\n@jax.jit\ndef h(x): return {} * x\ndef own(x): return h(x)",
    "cached": "import functools as f\n@f.cache\ndef h(x): return {}\ndef own(x): return h(x)",
    "partial": "import functools\nh = functools.partial(max, {})\ndef own(x): return h(x)",
    "wrapper of a library's": "import functools\nimport numpy as np\n"
    "@functools.wraps(np.abs)\ndef own(x): return {} * x",
    "another module": "import own_helpers\nown_helpers.h.k = {}\n"
    "def own(x): return own_helpers.h(x)",
    "function of another module": "from own_helpers import h\nh.k = {}\ndef own(x): return h(x)",
    "import when it runs": "import own_helpers\nown_helpers.h.k = {}\n"
    "def own(x):\n  from own_helpers import h\n  return h(x)",
    "attribute of the function": "def own(x): return own.k * x\nown.k = {}",
    "tuple": "from typing import NamedTuple\nclass S(NamedTuple):\n  f: float\n"
    "  def add(self, x): return {}\nown = S(1.0)",
    "class": "class S:\n  def add(self, x): return {}\nown = S()",
    "subclass of a data class": "from keyhole.server.optimizers import SGD\nclass S(SGD): pass\n"
    "own = S(1.0)\nobject.__setattr__(own, 'k', {})",
    "subclass of a named class": "class A: name, version = 'a', '1'\n"
    "class B(A):\n  def add(self, x): return {}\nown = B()",
    "instance with a name": "class A: pass\nown = A()\nown.name, own.version, own.k = 'a', '1', {}",
    "callable that wraps": "import functools\nclass W:\n"
    "  def __call__(self, x): return self.k\nown = W()\n"
    "functools.update_wrapper(own, max)\nown.k = {}",
    "float": "class F(float): pass\nown = F(1.0)\nown.k = {}",
    "list": "class L(list): pass\nown = L([1])\nown.k = {}",
    "array": "import numpy as np\nclass A(np.ndarray): pass\nown = np.zeros(2).view(A)\nown.k = {}",
    "masked array": "import numpy as np\nown = np.ma.masked_array([1, 1], mask=[{} == 1, False])",
    "factory": "import collections\nown = collections.defaultdict(lambda: {})",
    "descriptor": "class D:\n  def __set__(self, o, v): pass\n  def __get__(self, *_): return {}\n"
    "class A: k = D()\nown = A()",
    "hidden from pickle": "class R:\n  def __init__(self, k): self.k = k\n"
    "  def __getstate__(self): return {{}}\nown = R({})",
    "hidden by a constructor": "class R:\n  def __init__(self, k): self.k = k\n"
    "  def __reduce__(self): return R, (0,)\nown = R({})",
    "hidden in a slot": "class R:\n  __slots__ = ('k',)\n  def __init__(self, k): self.k = k\n"
    "  def __reduce_ex__(self, version): return R, (0,)\nown = R({})",
    "hidden in a base": "class R:\n  def __getstate__(self): return {{}}\n"
    "class S(R): pass\nown = S()\nown.k = {}",
    "jax key": "import jax\nown = jax.random.key({})",
    "jax derivative": "import jax\nown = jax.custom_jvp(lambda x: x)\n"
    "own.defjvp(lambda p, t: (p, {}))",
    "jax arguments": "import jax\nown = jax.jit(lambda x, y, z: x, static_argnums={})",
}


def made(source, **more):
    variables = {"__name__": "own_module", **more}
    exec(source, variables)
    return variables["own"]


@pytest.fixture
def own_helpers(monkeypatch):
    module = types.ModuleType("own_helpers")
    exec("def h(x): return h.k * x", vars(module))
    monkeypatch.setitem(sys.modules, "own_helpers", module)


@pytest.mark.usefixtures("own_helpers")
@pytest.mark.parametrize("source", OWN.values(), ids=OWN)
def test_whatever_is_the_authors_own_counts(source):
    one, again, other = (identity_of(made(source.format(k))) for k in (1, 1, 2))
    assert one == again != other


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("def own(s, *r): return r", "def own(s, r): return r"),
        ("own = {'a': 1, 'b': 2}", "own = {'b': 2, 'a': 1}"),
        ("import numpy as np\nown = np.zeros(2)", "own = [0.0, 0.0]"),
    ],
    ids=["arguments", "order", "kind"],
)
def test_what_differs_a_little_is_another_part(one, other):
    assert identity_of(made(one)) != identity_of(made(other))


PLAIN_SOURCE = "def own(x):\n  def f(y):\n    return y\n  if x: return f(x)"
DOCUMENTED = (
    "# why\ndef own(x: int):\n  'doc'\n\n  def f(y):\n    'doc'\n    return y\n"
    "  if x:\n    return f(x)"
)


def test_words_and_places_do_not_count():
    assert identity_of(made(PLAIN_SOURCE)) == identity_of(made(DOCUMENTED, __name__="moved"))


def test_wrappers_of_what_the_library_ships_are_other_parts():
    first, second = (functools.wraps(top)(closure(factor)) for factor in (1, 2))
    assert len({identity_of(each) for each in (top, first, second)}) == 3


def test_a_shared_value_is_as_good_as_a_copy_and_depth_is_no_matter():
    one = closure(2)
    assert identity_of((one, one)) == identity_of((one, closure(2)))
    nested = [functools.reduce(lambda held, _: [held], range(400), k) for k in (1, 1, 2)]
    assert identity_of(nested[0]) == identity_of(nested[1]) != identity_of(nested[2])


def test_what_is_computed_on_the_way_does_not_count():
    used, fresh = Plain(2), Plain(2)
    assert used.computed == 4
    empty, filled = OnlyCached(), OnlyCached()
    assert filled.computed == 4
    assert identity_of(empty) == identity_of(filled)
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
    "value",
    [threading.Lock(), sys.stderr, (n for n in [1]), np.frompyfunc(abs, 1, 1)],
    ids=["lock", "file", "generator", "ufunc"],
)
def test_what_cannot_be_digested_is_refused_and_named(value):
    with pytest.raises(InputError, match=r"closure.*no identity.*`name` and `version`"):
        identity_of(closure(value))


def test_a_variable_that_cannot_be_digested_is_named():
    with pytest.raises(InputError, match=r"got a value of type lock as own\.helper\.guard"):
        identity_of(made("def helper(): return guard\ndef own(): return helper()", guard=LOCK))


def test_identities_are_the_same_in_another_process():
    code = "from tests.test_identity import MAKERS, identity_of\n"
    code += "for make in MAKERS.values(): print(identity_of(make(2)))"
    command = [sys.executable, "-c", code]
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        assert done.stdout.splitlines() == [identity_of(make(2)) for make in MAKERS.values()]
