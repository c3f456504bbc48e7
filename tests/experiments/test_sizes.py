"""The sizes of the paper's tables, to the printed digit."""

import pytest

from keyhole.data.open import make_synthetic
from keyhole.experiments import all_tasks
from keyhole.keys.budget import share_of_keys
from keyhole.models.cnn import cnn
from keyhole.models.dense import two_layer
from keyhole.models.logistic import tag_regression
from keyhole.models.transformer import TransformerSizes, transformer

TASKS = all_tasks()


def share(model, **counts):
    return model.layout.client_size(**counts) / model.layout.server_size


@pytest.mark.parametrize(
    ("m", "printed"), [(4, "0.08"), (8, "0.14"), (16, "0.26"), (32, "0.51"), (64, "1.00")]
)
def test_table_2(m, printed):
    assert f"{share(cnn(), filter=m):.2f}" == printed


@pytest.mark.parametrize(
    ("m", "printed"), [(10, "0.11"), (50, "0.30"), (100, "0.53"), (200, "1.00")]
)
def test_table_3(m, printed):
    assert f"{share(two_layer(), neuron=m):.2f}" == printed


@pytest.mark.parametrize(
    ("n", "m", "expected"),
    [(10**4, 100, 0.0101), (10**4, 1000, 0.1001), (10**5, 100, 0.0010), (10**5, 10**4, 0.1000)],
)
def test_tag_sizes(n, m, expected):
    """(500 m + 500) / (500 n + 500)."""
    assert round(share(tag_regression(n), word=m), 4) == expected


@pytest.mark.parametrize(
    ("alpha", "structured", "random", "mixed"),
    [(0.5, 0.814, 0.798, 0.611), (0.25, 0.721, 0.696, 0.417), (0.1, 0.665, 0.636, 0.300)],
)
def test_word_sizes(alpha, structured, random, mixed):
    """Untied output, 4 special words on top of alpha n."""
    sizes = TASKS["so_word"].defaults.sizes
    model = transformer(TransformerSizes(words=sizes["words"] + 4))
    word, neuron = model.layout.spaces
    few = share_of_keys([neuron], alpha)["neuron"]
    own = round(alpha * sizes["words"]) + 4
    found = [
        share(model, word=own, neuron=neuron.num_keys),
        share(model, word=word.num_keys, neuron=few),
        share(model, word=own, neuron=few),
    ]
    assert found == pytest.approx([structured, random, mixed], abs=6e-4)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("emnist_cnn", 1_690_046), ("emnist_2nn", 209_662), ("so_tag", 5_000_500)],
)
def test_a_task_has_the_paper_s_model(name, expected):
    kind = TASKS[name]
    sizes = {"words": 10_000, "users": 20} if kind.kind == "posts" else {"writers": 5}
    task = kind.on(make_synthetic(kind.kind, 0, **sizes))
    assert task.model.layout.server_size == expected
