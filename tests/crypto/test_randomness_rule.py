"""Secrets have one source: no file of `crypto/`, `delivery/`, `aggregation/` draws from a generator
that can be foreseen, and none but `prg.py` asks the operating system.

Read from the syntax tree, whatever the spelling; what is hidden in a string that is executed, or
behind a name that is computed, is not found.
"""

import ast

import pytest

from tests.helpers import ROOT

SOURCE = ROOT / "src" / "keyhole"
FOLDERS = ("crypto", "delivery", "aggregation")
FILES = sorted(path for folder in FOLDERS for path in (SOURCE / folder).rglob("*.py"))
PRG = SOURCE / "crypto" / "prg.py"

# Generators that can be foreseen.
FORESEEN = {"random", "numpy.random", "jax.random"}
# Whatever asks the operating system, by itself or through a library.
SYSTEM_MODULES = {"secrets", "uuid"}
SYSTEM_NAMES = {"urandom", "getrandom", "SystemRandom", "token_bytes", "token_hex", "randbelow"}
# Keys that a library draws from a generator of its own.
KEY_MAKERS = {"generate_key", "generate_private_key", "random_serial_number"}
SYSTEM_FILES = {"/dev/random", "/dev/urandom"}


def broken_rules(source, is_prg=False):
    """What a module does against the rule: pairs of a line and what stands there."""
    found = []
    for node in ast.walk(ast.parse(source)):
        found += [(node.lineno, name) for name in _foreseen(node)]
        if not is_prg:
            found += [(node.lineno, name) for name in _from_system(node)]
    return found


def _foreseen(node):
    for name in _imported(node):
        if any(name == module or name.startswith(module + ".") for module in FORESEEN):
            yield name
    # `np.random`, `numpy.random`, `self.np.random`: nothing else has an attribute of that name.
    if isinstance(node, ast.Attribute) and node.attr == "random":
        yield ".random"
    if _text(node) in FORESEEN:
        yield _text(node)


def _from_system(node):
    for name in _imported(node):
        package, *rest = name.split(".")
        if package in SYSTEM_MODULES or (SYSTEM_NAMES | KEY_MAKERS) & set(rest):
            yield name
    if isinstance(node, ast.Attribute) and node.attr in SYSTEM_NAMES | KEY_MAKERS:
        yield f".{node.attr}"
    if isinstance(node, ast.Attribute) and ast.unparse(node).endswith("Key.generate"):
        yield ast.unparse(node)
    if _text(node) in SYSTEM_MODULES | SYSTEM_NAMES | SYSTEM_FILES:
        yield _text(node)


def _imported(node):
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def _text(node):
    """A constant text: what `getattr`, `__import__`, `import_module` and `open` would be given."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_secrets_come_from_the_one_generator(path):
    assert broken_rules(path.read_text(), path == PRG) == []


def test_the_rule_reads_files_that_are_there():
    assert PRG in FILES
    assert SOURCE / "delivery" / "pir" / "messages.py" in FILES


@pytest.mark.parametrize(
    "source",
    [
        "import random",
        "import random as dice",
        "from random import choice",
        "import numpy.random",
        "import numpy.random as dice",
        "from numpy import random",
        "from numpy import random as dice",
        "from numpy.random import default_rng",
        "from numpy.random._generator import Generator",
        "import numpy\nnumpy.random.bytes(16)",
        "import numpy as np\ndef draw():\n    return np.random.default_rng()",
        "import numpy as np\nrng: np.random.Generator",
        "import numpy as np\ndice = getattr(np, 'random')",
        "dice = __import__('random')",
        "from importlib import import_module\ndice = import_module('numpy.random')",
        "def draw():\n    import random\n    return random.random()",
        "from jax import random",
        "import jax\njax.random.key(0)",
    ],
)
@pytest.mark.parametrize("is_prg", [False, True], ids=["elsewhere", "in prg.py"])
def test_a_generator_that_can_be_foreseen_is_caught_in_any_spelling(source, is_prg):
    assert broken_rules(source, is_prg)


@pytest.mark.parametrize(
    "source",
    [
        "import secrets",
        "from secrets import token_bytes",
        "import os\nos.urandom(16)",
        "from os import urandom",
        "from os import urandom as draw",
        "import os\nos.getrandom(16)",
        "import os\ngetattr(os, 'urandom')(16)",
        "import uuid",
        "from pathlib import Path\nPath('/dev/urandom').open()",
        "__import__('secrets').token_bytes(16)",
        "x25519.X25519PrivateKey.generate()",
        "from m import Ed25519PrivateKey\nEd25519PrivateKey.generate()",
        "ec.generate_private_key(ec.SECP256R1())",
        "from m.ec import generate_private_key",
        "AESGCM.generate_key(128)",
    ],
)
def test_the_operating_system_is_asked_in_prg_alone(source):
    assert broken_rules(source)
    assert not broken_rules(source, is_prg=True)


@pytest.mark.parametrize(
    "source",
    [
        "from keyhole.crypto.prg import Prg\nPrg.fresh().bytes(16)",
        "'''Uniform and random: see random.org.'''\nrandom_point = 3",
        "import numpy as np\nnp.arange(3)",
        "slices.generate()",
        "def draw(random):\n    return random",
    ],
)
def test_what_is_allowed_is_not_caught(source):
    assert broken_rules(source) == []
