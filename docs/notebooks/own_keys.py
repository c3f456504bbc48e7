# %% [markdown]
# # Own keys
#
# Which keys should a client choose? Here is a data set on which the usual answer, the most
# frequent ones, is the wrong one, and a choice of ten lines that does better.
#
# Forty people write posts about two of four topics each. A post has nine common words, which
# say nothing, and three of its topic. The model guesses the topic.

# %%
import jax
import numpy as np

import keyhole as kh

TOPICS, COMMON, OWN = 4, 20, 20
WORDS = 1 + COMMON + TOPICS * OWN  # word 0 stands for those that a client did not select
rng = np.random.default_rng(0)
people, topics, posts = [], [], []
for person in range(40):
    for topic in rng.choice(rng.choice(TOPICS, 2, replace=False), 15):
        common = 1 + rng.integers(COMMON, size=9)
        own = 1 + COMMON + topic * OWN + rng.integers(OWN, size=3)
        people.append(person)
        topics.append(topic)
        posts.append([*common, *own])
table = {"person": people, "words": np.array(posts), "topic": np.array(topics)}
data = kh.data.from_arrays(table, client="person", inputs={"words": "word"}, target="topic")
data = data.hold_out(0.25)

# %% [markdown]
# The model adds up the rows of a post's words: a softmax regression. Every client holds word 0,
# which takes the place of words that it did not select (`missing="unknown"` below). Without it,
# a post with such a word would be left out.


# %%
def predict(params, batch):
    return params["weights"][batch["words"]].sum(axis=1)


def loss(params, batch, mask):
    chances = jax.nn.log_softmax(predict(params, batch))
    right = jax.numpy.take_along_axis(chances, batch["topic"][:, None], axis=1)[:, 0]
    return -(right * mask).sum() / mask.sum()


def accuracy(outputs, examples):
    return float(np.mean(outputs.argmax(axis=1) == examples["topic"]))


word = kh.KeySpace("word", WORDS)
model = kh.jax.Model(
    init=lambda seed: {"weights": np.zeros((WORDS, TOPICS), np.float32)},
    loss=loss,
    predict=predict,
    cuts=(kh.Cut(word, {"weights": 0}),),
)

# %% [markdown]
# A choice is a function of a context: `context.counts` says which words the client uses and how
# often, `context.max_keys` how many it may hold. This one weighs a word by how rare it is among
# people, as tf-idf does. How many people use a word is knowledge that all clients share.

# %%
train = data.splits["train"]
users_of = np.zeros(WORDS)
for i in range(len(train)):
    users_of[np.unique(train.client(i)["words"])] += 1
weight = np.log((1 + len(train)) / (1 + users_of))


def distinctive(context):
    keys, counts = context.counts.keys, context.counts.counts
    order = np.argsort(-counts * weight[keys], kind="stable")
    return keys[order[: context.max_keys]]


# %% [markdown]
# Three choices, two sizes:

# %%
settings = {
    "rounds": 15,
    "cohort": 10,
    "client_lr": 1.0,
    "mean_over": "choosers",
    "progress": False,
}
choices = {"top": kh.keys.top, "random": kh.keys.random_own, "distinctive": distinctive}
for m in (8, 30):
    for name, choice in choices.items():
        task = kh.Task(
            model,
            data,
            keys=choice,
            metrics={"accuracy": accuracy},
            missing="unknown",
            unknown={"word": 0},
        )
        run = kh.train(task, m=m, **settings)
        print(f"m={m:<3} {name:12} accuracy {run.metrics['accuracy']:.2f}")

# %% [markdown]
# With eight words, the most frequent ones say almost nothing. With thirty, a client holds most
# of what it uses and the choice matters less. The data are made for this effect: on real posts,
# frequent words matter, and the paper found the most frequent ones to be best. Try yours on
# your data before you believe this page.
