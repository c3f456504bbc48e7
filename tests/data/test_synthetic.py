"""Laws of synthetic data of every kind: a function of the seed, client by client."""

import hashlib
from functools import cache

import pytest

from keyhole.data.federated import Ragged
from keyhole.data.open import GENERATOR, make_synthetic
from keyhole.errors import InputError

FEW = {
    "writers": {"writers": 4, "min_images": 8, "max_images": 20},
    "posts": {"users": 20, "words": 2000, "tags": 60, "topics": 12},
    "ratings": {"users": 4, "items": 400},
}
CLIENTS = {"writers": "writers", "posts": "users", "ratings": "users"}
MORE = {"writers": 6, "posts": 35, "ratings": 9}
KINDS = sorted(FEW)
NUMBERED = {"words": "words", "title": "words", "tags": "tags"}  # what a column's numbers stand for


def digest(data):
    """Hashes every byte of a dataset."""
    text = hashlib.sha256(repr((data.name, data.kind, data.names, data.facts)).encode())
    for split, part in sorted(data.splits.items()):
        text.update(repr((split, list(part.client_ids))).encode())
        for client in range(len(part)):
            for name, column in sorted(part.client(client).items()):
                is_ragged = isinstance(column, Ragged)
                values = (column.flat, column.lengths) if is_ragged else (column,)
                text.update(name.encode() + b"".join(v.tobytes() for v in values))
    return text.hexdigest()


def plain(data, split, client):
    """A client's data with names in place of numbers that rank clients."""
    columns = data.splits[split].client(client)
    return {
        name: [[data.names[NUMBERED[name]][i] for i in row] for row in column]
        if name in NUMBERED
        else [row.tolist() for row in column]
        for name, column in columns.items()
    }


@cache
def few(kind):
    return make_synthetic(kind, 5, **FEW[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_gives_the_same_bytes(kind):
    again, other = (digest(make_synthetic(kind, seed, **FEW[kind])) for seed in (5, 6))
    assert digest(few(kind)) == again
    assert digest(few(kind)) != other


@pytest.mark.parametrize("kind", KINDS)
def test_nobody_else_has_a_say_in_what_a_client_holds(kind):
    """Up to the numbers of words and tags, which rank all users: names stay."""
    more = make_synthetic(kind, 5, **{**FEW[kind], CLIENTS[kind]: MORE[kind]})
    for split, part in few(kind).splits.items():
        assert more.splits[split].client_ids[: len(part)] == part.client_ids
        for client in range(len(part)):
            assert plain(few(kind), split, client) == plain(more, split, client)


@pytest.mark.parametrize("kind", KINDS)
def test_two_clients_do_not_share_a_stream(kind):
    data = few(kind)
    clients = [repr(plain(data, "train", i)) for i in range(len(data.splits["train"]))]
    assert len(set(clients)) == len(clients)


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_named_synthetic_and_says_so(kind):
    data = few(kind)
    assert (data.name, data.kind) == ("synthetic", kind)
    assert "synthetic" in data.facts["source"]
    assert data.facts["seed"] == "5"


OTHER = {
    "writers": {"seed": 6, "writers": 5, "min_images": 9, "max_images": 19},
    "posts": {"seed": 6, "users": 21, "words": 2001, "tags": 61, "topics": 11},
    "ratings": {"seed": 6, "users": 5, "items": 401, "min_ratings": 21, "max_ratings": 190},
}


@pytest.mark.parametrize("kind", KINDS)
def test_no_two_datasets_have_the_same_facts(kind):
    given = {"seed": 5, **FEW[kind]}
    made = [make_synthetic(kind, **{**given, name: value}) for name, value in OTHER[kind].items()]
    facts = [tuple(sorted(data.facts.items())) for data in (few(kind), *made)]
    assert len(set(facts)) == len(OTHER[kind]) + 1
    assert few(kind).facts.keys() >= OTHER[kind].keys()
    assert few(kind).facts["generator"] == GENERATOR
    assert all(isinstance(value, str) for value in few(kind).facts.values())


def test_a_size_that_is_a_default_is_told_like_any_other():
    assert make_synthetic("ratings", 5, users=9).facts == (
        make_synthetic("ratings", 5, users=9, max_ratings=200).facts
    )


@pytest.mark.parametrize(
    ("kind", "sizes", "named"),
    [
        ("letters", {}, "letters"),
        ("posts", {"writers": 3}, "writers"),
        ("writers", {"writers": 0}, "writers"),
        ("writers", {"min_images": 1}, "min_images"),
        ("writers", {"min_images": 30, "max_images": 29}, "max_images"),
        ("writers", {"writers": 2.5}, "2.5"),
        ("posts", {"users": 9}, "users"),
        ("posts", {"words": 199}, "words"),
        ("posts", {"tags": 49}, "tags"),
        ("posts", {"topics": 2}, "topics"),
        ("ratings", {"users": True}, "users"),
        ("ratings", {"items": 199}, "items"),
    ],
)
def test_a_size_that_cannot_be_is_refused_by_name(kind, sizes, named):
    with pytest.raises(InputError, match=named):
        make_synthetic(kind, 5, **sizes)


def test_a_negative_seed_is_refused():
    with pytest.raises(InputError, match="seed"):
        make_synthetic("ratings", -1)
