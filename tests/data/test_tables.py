"""Frames of pandas, datasets of Hugging Face and files give what arrays give."""

import json

import numpy as np
import pytest

import keyhole as kh
from keyhole.errors import InputError

DECLARED = {"client": "user", "inputs": {"item": "item"}, "target": "label"}
COLUMNS = {"user": ["ann", "ben", "ann"], "item": [7, 3, 8], "label": [1.0, 0.0, 0.5]}
WORDS = {"user": ["ann", "ben"], "words": [["a", "b"], ["b"]]}
OF_WORDS = {"client": "user", "inputs": {"words": "word"}}


def facts(columns=COLUMNS, declared=DECLARED):
    return kh.data.from_arrays(columns, **declared).facts


def write_csv(path, text="user,item,label\nann,7,1.0\nben,3,0.0\nann,8,0.5\n"):
    path.write_text(text)
    return path


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows_of(columns):
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def test_a_csv_file_gives_what_arrays_give(tmp_path):
    data = kh.data.from_files(write_csv(tmp_path / "mine.csv"), **DECLARED)
    assert (data.facts, data.name) == (facts(), "mine")


def test_jsonl_files_give_what_arrays_give(tmp_path):
    path = write_jsonl(tmp_path / "mine.jsonl", rows_of(COLUMNS))
    assert kh.data.from_files(path, **DECLARED).facts == facts()
    path = write_jsonl(tmp_path / "words.jsonl", rows_of(WORDS))
    assert kh.data.from_files(path, **OF_WORDS).facts == facts(WORDS, OF_WORDS)


def test_an_npz_file_gives_what_arrays_give(tmp_path):
    np.savez(tmp_path / "mine.npz", **{name: np.array(v) for name, v in COLUMNS.items()})
    assert kh.data.from_files(tmp_path / "mine.npz", **DECLARED).facts == facts()
    rows = {"words.values": np.array([1, 2, 2]), "words.offsets": np.array([0, 2, 3])}
    np.savez(tmp_path / "words.npz", user=np.array(["ann", "ben"]), **rows)
    data = kh.data.from_files(tmp_path / "words.npz", **OF_WORDS)
    assert [row.tolist() for row in data.splits["train"].columns["words"]] == [[1, 2], [2]]


def test_several_files_are_one_table(tmp_path):
    first = write_csv(tmp_path / "a.csv", "user,item,label\nann,7,1.0\nben,3,0.0\n")
    second = write_csv(tmp_path / "b.csv", "user,item,label\nann,8,0.5\n")
    told = []
    data = kh.data.from_files(
        [first, second], progress=lambda done, total: told.append((done, total)), **DECLARED
    )
    assert data.facts == facts()
    total = first.stat().st_size + second.stat().st_size
    assert told[-1] == (total, total)


def test_codes_with_zeros_in_front_are_texts_wherever_the_first_letter_comes(tmp_path, monkeypatch):
    monkeypatch.setattr("keyhole.data.tables._CHUNK", 2)
    text = "user,item\na,007\nb,7\na,x\n"
    data = kh.data.from_files(
        write_csv(tmp_path / "codes.csv", text), client="user", inputs={"item": "item"}
    )
    assert sorted(data.names["item"]) == ["007", "7", "x"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("user,item,label\nann,7\n", "got 2 cells in line 2, not 3"),
        ("user,item,label\n,7,1\n", "has no client id in row 0"),
        ("user,item,label\nann,,1\n", "column 'item' names no key in row 0 of client 'ann'"),
        ("", "got a first line of nothing, not of names"),
        ("user,user\na,b\n", "got a first line of user, user, not of names"),
        ("user,item,label\n", "column 'user' names no clients"),
        ('user,item,label\n"ann,7,1\n', "got line 2: unexpected end of data"),
        ("user,item\nann,7\n", "target names a column that is not there: got 'label'"),
    ],
)
def test_a_bad_csv_file_is_one_error(tmp_path, text, said):
    with pytest.raises(InputError) as raised:
        kh.data.from_files(write_csv(tmp_path / "bad.csv", text), **DECLARED)
    assert said in str(raised.value)


def test_bad_files_are_named(tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"user": 1}\n[2]\n')
    with pytest.raises(InputError, match=r"bad.jsonl: got a list in line 2, not an object"):
        kh.data.from_files(tmp_path / "bad.jsonl", **DECLARED)
    (tmp_path / "bad.jsonl").write_text('{"user": 1\n')
    with pytest.raises(InputError, match=r"bad.jsonl: got line 1: "):
        kh.data.from_files(tmp_path / "bad.jsonl", **DECLARED)
    (tmp_path / "bad.npz").write_bytes(b"PK")
    with pytest.raises(InputError, match=r"cannot use .*bad.npz"):
        kh.data.from_files(tmp_path / "bad.npz", **DECLARED)
    offsets = {"words.values": np.arange(3), "words.offsets": np.array([0, 9])}
    np.savez(tmp_path / "cut.npz", user=np.array(["a"]), **offsets)
    with pytest.raises(InputError, match=r"words.offsets that do not cut words.values"):
        kh.data.from_files(tmp_path / "cut.npz", **OF_WORDS)
    with pytest.raises(InputError, match=r"none.csv: got no such file"):
        kh.data.from_files(tmp_path / "none.csv", **DECLARED)
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(InputError, match=r"expected a file that ends in .csv, .jsonl"):
        kh.data.from_files(tmp_path / "mine.txt", **DECLARED)
    other = [write_csv(tmp_path / "a.csv"), write_csv(tmp_path / "b.csv", "user\nann\n")]
    with pytest.raises(InputError, match=r"b.csv: got columns user; expected user, item, label"):
        kh.data.from_files(other, **DECLARED)


def test_a_frame_gives_what_arrays_give():
    pd = pytest.importorskip("pandas")
    assert kh.data.from_pandas(pd.DataFrame(COLUMNS), **DECLARED).facts == facts()
    frame = pd.DataFrame({**COLUMNS, "item": pd.array([7, 3, 8], "Int64")}, index=[5, 6, 7])
    frame["user"] = frame["user"].astype("category")
    assert kh.data.from_pandas(frame, **DECLARED).facts == facts()
    assert kh.data.from_pandas(pd.DataFrame(WORDS), **OF_WORDS).facts == facts(WORDS, OF_WORDS)


@pytest.mark.parametrize("zone", [None, "Europe/Berlin"])
def test_dates_of_a_frame_are_microseconds(zone):
    pd = pytest.importorskip("pandas")
    when = pd.to_datetime(["1970-01-01T01:00:01", "1970-01-02T01:00:00"]).tz_localize(zone)
    data = kh.data.from_pandas(pd.DataFrame({"user": ["a", "b"], "when": when}), client="user")
    hour = 0 if zone else 3_600_000_000
    expected = [1_000_000 + hour, 86_400_000_000 + hour]
    assert data.splits["train"].columns["when"].tolist() == expected


@pytest.mark.parametrize(
    ("column", "values", "said"),
    [
        ("user", ["ann", None, "ann"], "column 'user' has no client id in row 1"),
        ("item", [7, None, 8], "column 'item' names no key in row 1 of client 'ben': got nan"),
        ("item", ["a", None, "b"], "column 'item' has no value in row 1 of client 'ben'"),
    ],
)
def test_a_frame_with_gaps_is_one_error(column, values, said):
    pd = pytest.importorskip("pandas")
    for kind in (None, "string" if isinstance(values[0], str) else "Int64"):
        frame = pd.DataFrame({**COLUMNS, column: pd.array(values, kind)})
        with pytest.raises(InputError) as raised:
            kh.data.from_pandas(frame, **DECLARED)
        assert said in str(raised.value)


def test_what_is_no_frame_is_refused():
    pd = pytest.importorskip("pandas")
    with pytest.raises(InputError, match=r"got a dict; expected a pandas.DataFrame"):
        kh.data.from_pandas(COLUMNS, **DECLARED)
    twice = pd.DataFrame([["ann", 1, 2]], columns=["user", "item", "item"])
    with pytest.raises(InputError, match="has a column twice: got item"):
        kh.data.from_pandas(twice, **DECLARED)


def test_a_parquet_file_gives_what_arrays_give(tmp_path):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    columns = {**COLUMNS, "user": pa.array(COLUMNS["user"]).dictionary_encode()}
    parquet.write_table(pa.table(columns), tmp_path / "mine.parquet", row_group_size=2)
    assert kh.data.from_files(tmp_path / "mine.parquet", **DECLARED).facts == facts()
    parquet.write_table(pa.table(WORDS), tmp_path / "words.parquet")
    data = kh.data.from_files(tmp_path / "words.parquet", **OF_WORDS)
    assert data.facts == facts(WORDS, OF_WORDS)
    numbers = {"user": ["ann", "ben", "ann"], "words": [[1, 2], [3], []]}
    parquet.write_table(pa.table(numbers), tmp_path / "rows.parquet", row_group_size=1)
    data = kh.data.from_files(tmp_path / "rows.parquet", **OF_WORDS)
    assert data.facts == facts(numbers, OF_WORDS)
    parquet.write_table(pa.table({**COLUMNS, "item": [7, None, 8]}), tmp_path / "gap.parquet")
    with pytest.raises(InputError, match="column 'item' names no key in row 1 of client 'ben'"):
        kh.data.from_files(tmp_path / "gap.parquet", **DECLARED)
    (tmp_path / "bad.parquet").write_bytes(b"PAR1")
    with pytest.raises(InputError, match=r"cannot use .*bad.parquet"):
        kh.data.from_files(tmp_path / "bad.parquet", **DECLARED)


def test_parquet_without_its_library_says_what_to_install(tmp_path, monkeypatch):
    for library in ("pyarrow", "pandas"):
        monkeypatch.setitem(__import__("sys").modules, library, None)
    (tmp_path / "mine.parquet").write_bytes(b"PAR1")
    with pytest.raises(InputError, match=r"pip install 'keyhole\[data\]'"):
        kh.data.from_files(tmp_path / "mine.parquet", **DECLARED)


def test_a_dataset_of_hugging_face_gives_what_arrays_give():
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_dict(COLUMNS)
    assert kh.data.from_huggingface(made, **DECLARED).facts == facts()
    turned = made.select([2, 1, 0]).select([2, 1, 0])  # with a table of indices
    assert kh.data.from_huggingface(turned, **DECLARED).facts == facts()
    words = datasets.Dataset.from_dict(WORDS)
    assert kh.data.from_huggingface(words, **OF_WORDS).facts == facts(WORDS, OF_WORDS)
    with pytest.raises(InputError, match=r"got a DatasetDict; expected one split"):
        kh.data.from_huggingface(datasets.DatasetDict({"train": made}), **DECLARED)


def test_class_labels_of_hugging_face_keep_their_names():
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_dict(
        {"user": ["a", "b"], "label": [1, 0]},
        features=datasets.Features(
            {"user": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])}
        ),
    )
    data = kh.data.from_huggingface(made, client="user", target="label")
    assert data.names == {"label": ["no", "yes"]}
