# %% [markdown]
# # First run
#
# Train a model with and without select, and look at what a run holds. People rate films; the
# model learns one number for each film. A client holds the films it has rated, or only some of
# them.

# %%
import numpy as np

import keyhole as kh
from keyhole.models.dense import masked_mean

FILMS, PEOPLE = 300, 60
rng = np.random.default_rng(0)
film = np.minimum(rng.zipf(1.4, 20 * PEOPLE) - 1, FILMS - 1)  # a few films are rated by many
stars = np.clip(3 + 2 * np.sin(film) + rng.normal(0, 0.3, len(film)), 1, 5).astype(np.float32)
table = {"person": rng.integers(PEOPLE, size=len(film)), "film": film, "stars": stars}
data = kh.data.from_arrays(table, client="person", inputs={"film": "film"}, target="stars")
data = data.hold_out(0.2)
print({name: (len(split), split.num_examples) for name, split in data.splits.items()})

# %% [markdown]
# The first number is clients, the second examples. Now the model: how parameters start, what it
# predicts, and its loss. `Cut(space, {"score": 0})` says that film k owns entry k of `score`.


# %%
def predict(params, batch):
    return params["score"][batch["film"]]


def loss(params, batch, mask):
    return masked_mean((predict(params, batch) - batch["stars"]) ** 2, mask)


def error(outputs, examples):
    return float(np.abs(outputs - examples["stars"]).mean())


space = kh.KeySpace("film", FILMS)
model = kh.jax.Model(
    init=lambda seed: {"score": np.full(FILMS, 3, np.float32)},
    loss=loss,
    predict=predict,
    cuts=(kh.Cut(space, {"score": 0}),),
)
task = kh.Task(model, data, metrics={"error": error})

# %% [markdown]
# Train twice: clients with at most 5 films, and clients with all 300. Two trials each, so that
# there is a spread.

# %%
settings = {"rounds": 20, "cohort": 10, "client_lr": 0.5, "mean_over": "choosers"}
settings |= {"evaluate_every": 4, "trials": 2, "progress": False}
few = kh.train(task, m=5, out="runs/five", **settings)
full = kh.train(task, m="all", out="runs/all", **settings)
print(kh.compare(full, few))

# %%
kh.compare(full, few).plot("error", against="bytes", path="error.png")

# %% [markdown]
# A run is a folder, and can be opened later. Each round left a record: who took part, how many
# bytes moved, how many different films were selected.

# %%
run = kh.open_run("runs/five", task=task)
for record in run.records(trial=0)[:3]:
    print(record.round, "clients", len(record.clients), "distinct films", record.distinct_keys)
print("largest sub-model:", max(max(r.client_sizes) for r in run.records()), "of", FILMS)

# %% [markdown]
# The trained parameters are NumPy arrays under the model's own names. Something to measure that
# you think of only now is no problem either.

# %%
print(run.model()["score"][:5].round(1))
print(run.evaluate({"bias": lambda outputs, e: float(np.mean(outputs - e["stars"]))}))
