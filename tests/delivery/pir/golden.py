"""Golden bytes: what others read, held in files as hexadecimal text.

Renew them with KEYHOLE_RENEW_GOLDEN=1, and the version of the format with them.
"""

import json
import os

from tests.helpers import ROOT

FOLDER = ROOT / "tests" / "golden" / "private"


def assert_golden(name, messages):
    """Compares named messages with those of a golden file."""
    path = FOLDER / f"{name}.json"
    text = json.dumps({key: data.hex() for key, data in messages.items()}, indent=2) + "\n"
    if os.environ.get("KEYHOLE_RENEW_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()
