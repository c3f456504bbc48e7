"""A task whose bytes do not depend on how a sum rounds: a median for each film, of four people.

Gradients are halves, rates are powers of two, and the mean is over four: all numbers are multiples
of 1/1024, which shares hold exactly. Of the films of one person the others have rated most.
"""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np

from keyhole.data.federated import Dataset, FederatedData
from keyhole.models.dense import masked_mean
from keyhole.models.model import Model
from tests.seams import own_task

PEOPLE, EACH = 4, 8


def few(seed):
    """A data set, made when it is read; a function of the seed."""
    items = np.concatenate([np.arange(c, c + EACH) for c in range(PEOPLE)]).astype(np.int32)
    owner = np.repeat(np.arange(PEOPLE), EACH)
    columns = {"item": items, "half_stars": (items * 7 + owner * 3 + seed) % 10 + 1}
    people = FederatedData.of([str(c) for c in range(PEOPLE)], [EACH] * PEOPLE, columns)
    return Dataset("few", "ratings", {"train": people, "test": people}, {})


def loss(params, batch, mask):
    return masked_mean(jnp.abs(own_task.predict(params, batch) - batch["stars"]), mask)


def make(dataset, sizes, is_tuning):
    task = own_task.make(dataset, sizes, is_tuning)
    model = task.model
    return replace(task, model=Model(model.init, loss, model.predict, cuts=model.cuts))


MEDIANS = replace(
    own_task.FILMS, name="medians", about="Learn the median of each film's stars.", make=make
)
