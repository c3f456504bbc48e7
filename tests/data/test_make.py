"""The experiments' files, made from small files of the formats that their sources publish."""

import io
import json
import lzma
import re
import zipfile

import numpy as np
import pytest

from keyhole.data.make import MADE, make_file
from keyhole.data.open import SHARED, locate, open_dataset
from keyhole.data.readers.dumps import plain_text
from keyhole.errors import InputError
from keyhole.experiments.sweeps import SWEEPS
from tests.data import files
from tests.helpers import ROOT

MOVIES = 'movieId,title,genres\n1,Toy Story (1995),Comedy\n5,"Heat, The",Action|Crime\n'
RATINGS = "userId,movieId,rating,timestamp\n1,5,4.5,100\n1,1,0.5,50\n3,1,5.0,70\n"
TAGS = "userId,movieId,tag,timestamp\n3,5,so good,90\n"


def movielens(**changes):
    return {"movies.csv": MOVIES, "ratings.csv": RATINGS, "tags.csv": TAGS} | {
        name.replace("_", "."): text for name, text in changes.items()
    }


def write_all(folder, texts):
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def make(tmp_path, name, *sources):
    return make_file(name, sources, tmp_path / "made")


def test_movielens_from_its_folder_or_its_zip_file(tmp_path):
    folder = write_all(tmp_path / "ml-latest-small", movielens())
    with zipfile.ZipFile(tmp_path / "ml.zip", "w") as archive:
        for file in folder.iterdir():
            archive.write(file, f"ml-latest-small/{file.name}")
    path = make(tmp_path, "movielens_small", folder)
    arrays = np.load(path)
    assert arrays["user"].tolist() == [0, 0, 2]
    assert arrays["item"].tolist() == [1, 0, 0]
    assert arrays["half_stars"].tolist() == [9, 1, 10]
    assert arrays["item_title"].tolist() == ["Toy Story (1995)", "Heat, The"]
    assert (arrays["tag_item"].tolist(), arrays["tag_text"].tolist()) == ([1], ["so good"])
    assert (arrays["user"].dtype, arrays["item_movielens_id"].dtype) == (np.uint16, np.int32)
    zipped = np.load(make_file("movielens_small", [tmp_path / "ml.zip"], tmp_path / "again"))
    assert all(np.array_equal(zipped[name], arrays[name]) for name in arrays)
    data = open_dataset(path, cache=tmp_path / "cache")
    assert data.splits["test"].client(0)["item"].tolist() == [1]  # the later one in time


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ratings_csv": "userId,movieId\n1,2\n"}, "ratings.csv without one of userId"),
        ({"ratings_csv": RATINGS.replace("4.5", "4.7")}, "a rating that is no half star"),
        ({"ratings_csv": RATINGS.replace("1,5,", "1,9,")}, "expected numbers of MovieLens"),
        ({"ratings_csv": RATINGS.replace("1,5,", "x,5,")}, "expected numbers of MovieLens"),
    ],
)
def test_bad_files_of_movielens_are_named(tmp_path, changes, said):
    folder = write_all(tmp_path / "ml", movielens(**changes))
    with pytest.raises(InputError) as raised:
        make(tmp_path, "movielens_small", folder)
    assert said in str(raised.value)
    assert not (tmp_path / "made").exists()


def test_femnist_from_leaf_is_what_leaf_itself_gives(tmp_path):
    leaf = files.write_leaf(tmp_path / "leaf")
    made = open_dataset(make(tmp_path, "femnist", leaf), cache=tmp_path / "cache")
    own = open_dataset(leaf, cache=tmp_path / "cache")
    for split, people in own.splits.items():
        found = made.splits[split]
        assert list(found.client_ids) == list(people.client_ids)
        for i in range(len(people)):
            for name in ("pixels", "label"):
                assert np.array_equal(found.client(i)[name], people.client(i)[name])


def test_the_small_femnist_has_writers_of_many_characters_evenly(tmp_path, monkeypatch):
    """Ann wrote 3, 3, 3, 4: two images are one of each. Ben wrote one character and is left out."""
    monkeypatch.setattr("keyhole.data.make._WRITERS", 1)
    monkeypatch.setattr("keyhole.data.make._IMAGES", 2)
    people = {"train": {"ann": [3, 3, 3, 4], "ben": [5, 5]}, "test": {"ann": [3], "ben": [5]}}
    monkeypatch.setattr(files, "WRITERS", people)
    path = make(tmp_path, "femnist_mini", files.write_leaf(tmp_path / "leaf"))
    arrays = np.load(path)
    assert arrays["writer"].tolist() == ["ann"]
    assert arrays["labels"][arrays["split"] == 0].tolist() == [3, 4]
    assert arrays["labels"][arrays["split"] == 1].tolist() == [3]


def png(shade):
    """A page of NIST: 128 x 128, a square of ink on paper."""
    from PIL import Image

    page = np.full((128, 128), 255, np.uint8)
    page[32:96, 32:96] = shade
    buffer = io.BytesIO()
    Image.fromarray(page).convert("RGB").save(buffer, "png")
    return buffer.getvalue()


def write_nist(folder):
    """Writer f0001_10 wrote ten 0s and an A; both folders have the same bytes."""
    for number in range(11):
        code = "41" if number == 10 else "30"
        for place in (f"by_class/{code}/hsf_0", "by_write/hsf_0/f0001_10/d0001_10"):
            (folder / place).mkdir(parents=True, exist_ok=True)
            (folder / place / f"{place[:4]}_{number:02}.png").write_bytes(png(number))
    return folder


def test_femnist_from_nist_finds_the_label_of_an_image_by_its_bytes(tmp_path):
    path = make(tmp_path, "femnist", write_nist(tmp_path / "nist"))
    data = open_dataset(path, cache=tmp_path / "cache")
    train, test = (data.splits[split].client(0) for split in ("train", "test"))
    assert train["label"].tolist() == [0] * 9 + [10]
    assert test["label"].tolist() == [0]  # the tenth
    assert (train["pixels"][0, 14, 14], train["pixels"][0, 0, 0]) == (0, 255)
    assert test["pixels"][0, 14, 14] == 9


def test_a_folder_of_neither_is_named(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="expected LEAF's train and test, or NIST's by_class"):
        make(tmp_path, "femnist_mini", tmp_path / "empty")
    (tmp_path / "empty" / "by_class").mkdir()
    (tmp_path / "empty" / "by_write").mkdir()
    with pytest.raises(InputError, match="got 0 images by class and 0 writers"):
        make(tmp_path, "femnist_mini", tmp_path / "empty")


def row(**attributes):
    escaped = {
        name: str(value).replace("&", "&amp;").replace("<", "&lt;").replace('"', "&quot;")
        for name, value in attributes.items()
    }
    return "  <row " + " ".join(f'{name}="{value}"' for name, value in escaped.items()) + " />\n"


def xml(rows, end="</posts>"):
    return f'<?xml version="1.0"?>\n<posts>\n{"".join(rows)}{end}\n'


def post(number, kind, user, body, **more):
    day = f"2020-01-{number:02}T10:00:00.000"
    said = {"Id": number, "PostTypeId": kind, "OwnerUserId": user, "Body": body, "Score": -1}
    return row(**said, CreationDate=day, **more)


QUESTION = post(
    1,
    1,
    7,
    "<p>How do I <b>sort</b>?</p><pre><code>x()</code></pre>",
    Title='A "list"',
    Tags="<py><a>",
)
ANSWER = post(2, 2, 9, "<p>Call sorted of it &amp; see</p>", ParentId=1)
SHORT = post(3, 2, 9, "<p>No idea</p>", ParentId=1)
NOBODY = row(Id=4, PostTypeId=2, Body="<p>one two three</p>", CreationDate="2020-01-04", ParentId=1)
COMMENT = row(Id=5, PostId=2, UserId=7, Text="@ann it is 3 < 4", CreationDate="2020-01-05T00:00")


def write_site(folder, rows, comments=(COMMENT,)):
    return write_all(folder, {"Posts.xml": xml(rows), "Comments.xml": xml(comments)})


def posts_of(path):
    return [json.loads(line) for line in lzma.open(path, "rt", encoding="utf-8")]


def test_posts_of_a_dump_are_plain_text_by_user(tmp_path):
    site = write_site(tmp_path / "coffee.stackexchange.com", [QUESTION, ANSWER, SHORT, NOBODY])
    path = make(tmp_path, "stackexchange", site)
    question, comment, answer = posts_of(path)
    assert question == {
        "user": 0,
        "site": "coffee",
        "site_user": 7,
        "kind": "question",
        "post": 1,
        "date": "2020-01-01",
        "score": -1,
        "tags": ["py", "a"],
        "title": 'A "list"',
        "text": "How do I sort?",
    }
    assert (comment["kind"], comment["text"], comment["tags"]) == (
        "comment",
        "it is 3 < 4",
        ["py", "a"],
    )
    assert (answer["user"], answer["tags"], answer["title"]) == (1, ["py", "a"], "")
    assert answer["text"] == "Call sorted of it & see"


def test_the_small_file_has_those_who_wrote_most(tmp_path):
    """User 3 has nine answers; user 4 has seven, which are too few. Later dumps have |tags|."""
    asked = post(1, 1, 5, "<p>a b c</p>", Title="t", Tags="|x|y|")
    rows = [asked, *(post(i, 2, 3, "<p>a b c</p>", ParentId=1) for i in range(2, 11))]
    rows += [post(i, 2, 4, "<p>d e f</p>", ParentId=1) for i in range(11, 18)]
    sites = [write_site(tmp_path / "one", rows), write_site(tmp_path / "two", [QUESTION])]
    found = posts_of(path := make(tmp_path, "stackexchange_mini", *sites))
    assert {(each["site"], each["site_user"], each["user"]) for each in found} == {("one", 3, 0)}
    assert [each["post"] for each in found] == list(range(2, 11))
    assert found[0]["tags"] == ["x", "y"]
    with pytest.raises(InputError, match="clients for test"):
        open_dataset(path, cache=tmp_path / "cache")  # one user is one to test on


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "no Posts.xml"),
        (xml([QUESTION], end=""), "it is cut short"),
        (xml([row(PostTypeId=1)]), "expected rows of a Stack Exchange dump"),
    ],
)
def test_bad_dumps_are_named(tmp_path, text, said):
    site = write_all(tmp_path / "site", {} if text is None else {"Posts.xml": text})
    with pytest.raises(InputError) as raised:
        make(tmp_path, "stackexchange", site)
    assert said in str(raised.value)


def test_links_and_addresses_are_left_out_and_texts_are_cut():
    html = "<p>Write to me@x.org or see https://x.org/a?b, or <a href='u'>here</a>.</p><p>ok</p>"
    assert plain_text(html, 100) == "Write to or see or here.\nok"
    assert plain_text(html, 8) == "Write to"


def test_every_name_can_be_made_and_says_so_where_it_is_missing(tmp_path, monkeypatch):
    assert set(MADE) == SHARED.keys()
    for folder in (None, str(tmp_path)):
        monkeypatch.delenv("KEYHOLE_DATA", raising=False)
        if folder:
            monkeypatch.setenv("KEYHOLE_DATA", folder)
        for name in SHARED:
            with pytest.raises(InputError, match=f"keyhole data make {name} FROM"):
                locate(name)


def test_the_data_page_names_a_public_source_for_every_sweep():
    page = (ROOT / "docs" / "data.md").read_text()
    (table,) = re.findall(r"\| sweeps \|.*?\n\n", page, re.S)
    for sweep in SWEEPS:
        (line,) = [line for line in table.splitlines() if f"`{sweep}`" in line]
        assert "](https://" in line
    assert all(f"`{name}`" in table for name in MADE)


def test_mistakes_are_named(tmp_path):
    with pytest.raises(InputError, match=r"did you mean femnist\?"):
        make(tmp_path, "femnits", tmp_path)
    with pytest.raises(InputError, match=r"made from one source that is there: got .*nowhere"):
        make(tmp_path, "movielens_small", tmp_path / "nowhere")
    folder = write_all(tmp_path / "ml", movielens())
    make(tmp_path, "movielens_small", folder)
    with pytest.raises(InputError, match="is there already"):
        make(tmp_path, "movielens_small", folder)
