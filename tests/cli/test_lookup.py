"""`keyhole lookup` and `Lookup`: rows of a published model, by private queries alone."""

import numpy as np
import pytest

import keyhole as kh
from keyhole import tree
from keyhole.cli.main import main
from keyhole.device.device import Device
from keyhole.device.lookup import Lookup
from keyhole.errors import KeySpaceError
from tests.service.pir.pair import ONE, TWO, pair

WORDS, TAGS, MAX_KEYS = 400, 90, 5
MODEL = {
    "words": np.arange(WORDS * 6, dtype=np.float32).reshape(WORDS, 6),
    "tags": np.arange(TAGS * 2, dtype=np.float32).reshape(TAGS, 2),
}
WORD, TAG = kh.KeySpace("word", WORDS), kh.KeySpace("tag", TAGS)
LAYOUT = kh.Layout.of(MODEL, kh.Cut(WORD, {"words": 0}), kh.Cut(TAG, {"tags": 0}))
TOLD = {"keys_per_client": {"word": MAX_KEYS, "tag": 3}}


def published(both):
    from keyhole.server.optimizers import SGD
    from keyhole.server.state import ServerState

    state = ServerState.dense(LAYOUT, MODEL, SGD(1.0))
    return both.service.publisher.publish_state(state, number=0, settings=TOLD).id


def run(capsys, *args):
    """What a command ends with, and what it says."""
    with pytest.raises(SystemExit) as ended:
        main(list(args))
    return ended.value.code or 0, capsys.readouterr()


def seen(both):
    return [(method, path) for one in both.recorders for method, path, *_ in one.seen]


@pytest.mark.parametrize("roles", [ONE, TWO], ids=["one server", "two servers"])
def test_rows_are_those_of_the_model_and_nothing_asks_for_them_in_the_clear(tmp_path, roles):
    with pair(tmp_path, roles) as both:
        published(both)
        devices = [Device(url) for url in both.urls]
        with Lookup(*devices) as look:
            found = look({"word": [399, 7, 7]})
            again = look({"word": [0], "tag": [89]})
        np.testing.assert_array_equal(found.arrays["words"], MODEL["words"][found.keys["word"]])
        assert set(found.keys["word"]) == {399, 7}
        assert found.arrays.keys() == {"words"}
        np.testing.assert_array_equal(again.arrays["tags"], MODEL["tags"][[89]])
        asked = seen(both)
    assert not any("slices" in path for _, path in asked)
    posts = [path for method, path in asked if method == "POST"]
    assert len(posts) == 2 * 2 * len(roles)  # calls, tables, servers: whatever is wanted
    # The hint and the top of a table are fetched once.
    hints = [path for _, path in asked if path.endswith("/hint")]
    assert len(hints) == (2 if roles is ONE else 0)


@pytest.mark.parametrize(
    "keys", [{}, {"user": [1]}, {"word": [WORDS]}, {"word": range(MAX_KEYS + 1)}], ids=str
)
def test_keys_that_cannot_be_looked_up_are_refused_before_anything_is_asked(tmp_path, keys):
    with pair(tmp_path, ONE) as both:
        published(both)
        with Lookup(Device(both.urls[0])) as look, pytest.raises(KeySpaceError):
            look({name: np.array(z) for name, z in keys.items()})
        assert not any(method == "POST" for method, _ in seen(both))


@pytest.mark.parametrize("roles", [ONE, TWO], ids=["one server", "two servers"])
def test_the_command_writes_rows_and_their_keys(tmp_path, roles, capsys):
    out = tmp_path / "rows.npz"
    with pair(tmp_path / "rounds", roles) as both:
        published(both)
        second = ["--second", both.urls[1]] if len(roles) > 1 else []
        args = ["lookup", both.urls[0], "--keys", "word=7,42", *second, "--out", str(out)]
        code, said = run(capsys, *args)
    assert (code, said[0].startswith("2 rows: ")) == (0, True)
    size = sum(leaf.nbytes for leaf in tree.flatten(MODEL).values())
    assert f"; the whole model has {size:,}" in said[0]
    with np.load(out) as rows:
        assert rows["keys:word"].tolist() == [7, 42]
        np.testing.assert_array_equal(rows["words"], MODEL["words"][[7, 42]])


@pytest.mark.parametrize(
    "args",
    [
        ["--keys", "7,42"],
        ["--keys", "word=seven"],
        ["--keys", "word=1", "--second-token-file", "x"],
        ["--keys", "word=1", "--out", "rows.csv"],
    ],
)
def test_flags_that_make_no_sense_are_refused(tmp_path, args, capsys):
    out = [] if "--out" in args else ["--out", str(tmp_path / "rows.npz")]
    code, _ = run(capsys, "lookup", "http://127.0.0.1:1", *args, *out)
    assert code == 2
    assert list(tmp_path.iterdir()) == []
