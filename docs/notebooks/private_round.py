# %% [markdown]
# # A private round
#
# The keys of a client say something about it: the words it uses, the films it saw. This
# notebook trains the same model four times: in the clear, with a select that hides keys, with a
# sum that hides updates as well, and with differential privacy on top.

# %%
import numpy as np

import keyhole as kh
from keyhole.models.dense import masked_mean

FILMS, PEOPLE = 2000, 30
rng = np.random.default_rng(0)
film = rng.integers(FILMS, size=20 * PEOPLE)
table = {
    "person": rng.integers(PEOPLE, size=len(film)),
    "film": film,
    "stars": (film % 5 + 1).astype(np.float32),
}
data = kh.data.from_arrays(table, client="person", inputs={"film": "film"}, target="stars")
data = data.hold_out(0.2)


def predict(params, batch):
    return params["films"][batch["film"]].mean(axis=1)


def loss(params, batch, mask):
    return masked_mean((predict(params, batch) - batch["stars"]) ** 2, mask)


model = kh.jax.Model(
    init=lambda seed: {"films": np.zeros((FILMS, 64), np.float32)},
    loss=loss,
    predict=predict,
    cuts=(kh.Cut(kh.KeySpace("film", FILMS), {"films": 0}),),
)
error = {"error": lambda outputs, e: float(np.abs(outputs - e["stars"]).mean())}
task = kh.Task(model, data, metrics=error)
settings = {"rounds": 2, "cohort": 8, "m": 10, "client_lr": 20.0, "progress": False}

# %% [markdown]
# In the clear. A record says what each party learned while slices were delivered (`seen_by`)
# and updates added up (`seen_in_sum`).


# %%
def show(run):
    record = run.records()[-1]
    for phase, seen in {"select": record.seen_by, "sum": record.seen_in_sum}.items():
        for party, learned in seen.items():
            print(f"{phase:6} {party}: {learned}")
    down, up = np.mean(record.bytes_down), np.mean(record.bytes_up)
    print(f"bytes per client: {down:,.0f} down, {up:,.0f} up")


plain = kh.train(task, **settings)
show(plain)

# %% [markdown]
# Private information retrieval: two servers hold the model, and each answers a query from which
# it alone learns nothing. The slices are the same, so the model is the same, bit for bit. But
# the update still names its keys.

# %%
hidden = kh.train(task, delivery="pir", **settings)
show(hidden)
print("same model:", np.array_equal(hidden.model()["films"], plain.model()["films"]))

# %% [markdown]
# A secure sum: clients split their updates into shares for two servers, which see only the sum.
# Numbers are rounded to a ring on the way, so the model differs in the last digits.

# %%
secure = kh.train(task, delivery="pir", aggregation="secure-sparse", **settings)
show(secure)
difference = np.abs(secure.model()["films"] - plain.model()["films"]).max()
print("largest difference:", f"{difference:.1e}")

# %% [markdown]
# The sum itself can still tell: a film that one client chose shows that client's update.
# Differential privacy clips every update and adds noise to the sum; the run keeps an account.

# %%
noisy = kh.train(
    task, delivery="pir", aggregation="secure-sparse", dp_noise=1.0, dp_clip=0.5, **settings
)
spent = noisy.records()[-1].privacy
print({name: spent[name] for name in ("epsilon", "delta")})

# %% [markdown]
# With eight clients per round, noise drowns the model: privacy for clients needs large cohorts.
# This was a simulation in one process; over a network the same messages travel between devices
# and two operators. `docs/deploy.md` has the steps, `docs/trust.md` what is hidden from whom,
# and under which assumptions.
