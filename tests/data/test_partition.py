"""Examples of nobody, dealt out to clients: everyone has some, and nobody's is another's too."""

import numpy as np
import pytest

import keyhole as kh
from keyhole.data.federated import Ragged
from keyhole.errors import InputError

ROWS = 600


def make(clients=20, **changes):
    table = {
        "x": np.arange(ROWS),
        "label": np.arange(ROWS) % 5,
        "words": Ragged.of([[i] * (i % 2) for i in range(ROWS)]),
    }
    return kh.data.partition(table, clients=clients, inputs={"x": "x"}, **changes)


def entropy(data):
    """Of a client's labels in bits, the mean over clients; log2(5) = 2.32 where they are even."""
    found = []
    for i in range(len(data)):
        share = np.bincount(data.client(i)["label"], minlength=5) / data.counts[i]
        found.append(-sum(p * np.log2(p) for p in share if p))
    return np.mean(found)


@pytest.mark.parametrize("how", ["iid", "size", "dirichlet"])
@pytest.mark.parametrize("alpha", [0.01, 10.0])
def test_each_example_goes_to_one_client_and_each_client_has_one(how, alpha):
    data = make(how=how, alpha=alpha).splits["train"]
    assert sorted(data.columns["x"].tolist()) == list(range(ROWS))
    assert (data.columns["label"] == data.columns["x"] % 5).all()
    assert data.client_ids == [f"client {i}" for i in range(20)]
    assert data.counts.min() >= 1
    assert all(
        w.tolist() == [x] * (x % 2)
        for x, w in zip(data.columns["x"], data.columns["words"], strict=True)
    )


def test_iid_clients_are_of_one_size():
    assert set(make(clients=7).splits["train"].counts.tolist()) == {85, 86}


def test_a_small_alpha_makes_sizes_differ():
    """Of Dirichlet(alpha) shares over n clients the standard deviation falls as alpha grows."""
    even, uneven = (make(how="size", alpha=a).splits["train"].counts.std() for a in (100.0, 0.1))
    assert even < 10 < 40 < uneven
    assert entropy(make(how="size", alpha=1.0).splits["train"]) > 1.5


def test_a_small_alpha_makes_labels_differ():
    uneven, even = (entropy(make(how="dirichlet", alpha=a).splits["train"]) for a in (0.05, 100.0))
    assert uneven < 1.0 < 2.2 < even


def test_labels_may_be_texts():
    labels = np.array(["cat", "dog"])[np.arange(ROWS) % 2]
    data = kh.data.partition(
        {"label": labels}, clients=5, how="dirichlet", alpha=0.1, target="label"
    )
    assert sorted(data.names["label"]) == ["cat", "dog"]


def test_the_seed_decides_and_is_told():
    found = [make(how="dirichlet", seed=seed) for seed in (0, 0, 1)]
    assert found[0].facts == found[1].facts != found[2].facts
    assert found[0].facts["partition"] == "dirichlet, alpha 0.5 of label, seed 0"
    assert found[0].facts["sha256"] != found[2].facts["sha256"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"clients": 0}, "got 0 clients for 600 examples"),
        ({"clients": 601}, "got 601 clients for 600 examples"),
        ({"alpha": 0}, "alpha is out of range: got 0"),
        ({"how": "dirichlt"}, "did you mean dirichlet?"),
        ({"how": "dirichlet", "label": "lable"}, "did you mean label?"),
        ({"how": "dirichlet", "label": "words"}, "column 'words' holds no labels"),
    ],
)
def test_a_mistake_is_named(changes, said):
    with pytest.raises(InputError) as raised:
        make(**changes)
    assert said in str(raised.value)


def test_columns_of_different_length_are_refused():
    with pytest.raises(InputError, match=r"columns are of different length: got .'a': 3, 'b': 2"):
        kh.data.partition({"a": [1, 2, 3], "b": [1, 2]}, clients=2)


def test_the_figure_is_a_file(tmp_path):
    path = kh.data.plot_partition(make(how="dirichlet"), "label", tmp_path / "labels.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 10_000
    with pytest.raises(InputError, match=r"expected .png, .pdf or .svg"):
        kh.data.plot_partition(make(), "label", tmp_path / "labels.txt")
    with pytest.raises(InputError, match=r"did you mean label\?"):
        kh.data.plot_partition(make(), "lable", tmp_path / "labels.png")
