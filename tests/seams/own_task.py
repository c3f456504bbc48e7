"""An own task and its data set: a mean for each film, learned from the stars that people give.

keyhole train tests.seams.own_task:FILMS --data tests.seams.own_task:few_ratings
"""

import numpy as np

import keyhole as kh
from keyhole.data.federated import Dataset, FederatedData
from keyhole.experiments.task import TaskKind, TaskParts, places_of
from keyhole.identity import Ref
from keyhole.keys.choice import KeyCounts
from keyhole.models.dense import masked_mean
from keyhole.rounds.spec import ClientSpec, CohortSpec, KeySpec, RunSpec, ServerSpec

SCALE = 1.0  # what a film's number is multiplied by to give stars
PEOPLE = 8


def predict(params, batch):
    return SCALE * params["taste"][batch["film"], 0]


def loss(params, batch, mask):
    return masked_mean((predict(params, batch) - batch["stars"]) ** 2, mask)


def make(dataset, sizes, is_tuning):
    film, train = kh.KeySpace("film", sizes["films"]), dataset.splits["train"]

    def init(seed):
        return {"taste": np.zeros((film.num_keys, 1), np.float32)}

    def data(client):
        own = train.client(client)
        return {"film": np.asarray(own["item"]), "stars": own["half_stars"].astype(np.float32) / 2}

    def localize(own, keys):
        place = places_of(own["film"], keys["film"].array).astype(np.int32)
        return {"film": place[place >= 0], "stars": own["stars"][place >= 0]}

    return TaskParts(
        model=kh.Model(init, loss, predict, cuts=(kh.Cut(film, {"taste": 0}),)),
        clients=len(train),
        data=data,
        count_keys=lambda own: {"film": KeyCounts.of(film, own["film"])},
        localize=localize,
        metrics={"test": lambda state: {"mean": float(state.model()["taste"].mean())}},
    )


FILMS = TaskKind(
    name="films",
    about="Learn the mean of each film's stars; a key is a film.",
    kind="ratings",
    defaults=RunSpec(
        task=Ref("films"),
        sizes={"films": 12},
        rounds=4,
        evaluate_every=1,
        cohort=CohortSpec(size=3),
        client=ClientSpec(algorithm="FedAvg", lr=0.1, batch_size=2),
        keys={"film": KeySpec(choice=Ref("top"), count=3)},
        server=ServerSpec(lr=1.0),
    ),
    metric="mean",
    splits=("test",),
    make=make,
)


def few_ratings(seed):
    """A data set: three films each, made when it is read."""
    items = np.concatenate([np.arange(c, c + 3) for c in range(PEOPLE)]).astype(np.int32)
    columns = {"item": items, "half_stars": (items * 7 + seed) % 10 + 1}
    people = FederatedData.of([str(c) for c in range(PEOPLE)], [3] * PEOPLE, columns)
    return Dataset("few", "ratings", {"train": people, "test": people}, {})
