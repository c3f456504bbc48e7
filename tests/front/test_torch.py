"""PyTorch models: an update is that of a hand-written loop; what travels, and what is refused."""

import copy
import pickle
import sys

import numpy as np
import pytest

import keyhole as kh
from keyhole.data.federated import Dataset, FederatedData, Ragged
from keyhole.errors import CutError, InputError, ShapeError
from keyhole.models.client_update import ClientUpdate, TrainsItself, draw_batches

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch==2.13.0")
nn, functional = torch.nn, torch.nn.functional

ITEMS, USERS, EACH = 40, 10, 12
SPACE = kh.KeySpace("item", ITEMS)
CUT = [kh.Cut(SPACE, {"items.weight": 0})]


class Net(nn.Module):
    """Scores items by a vector each; with dropout, statistics, a frozen layer where asked."""

    def __init__(self, item, dropout=0.0, norm=False, frozen=False):
        super().__init__()
        self.items = nn.Embedding(item, 4)
        self.norm = nn.BatchNorm1d(4) if norm else nn.Identity()
        self.base = nn.Linear(4, 4)
        self.base.requires_grad_(not frozen)
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(4, 1)

    def forward(self, batch):
        hidden = self.base(self.norm(self.items(batch["item"])))
        return self.out(self.dropout(torch.tanh(hidden)))[:, 0]


def loss(outputs, batch):
    return functional.binary_cross_entropy_with_logits(outputs, batch["label"])


def make_model(net=None, **changes):
    return kh.torch.Model(
        lambda item: Net(item, **(net or {})),
        loss,
        cuts=CUT,
        **changes,
    )


def make_data(seed=0):
    rng = np.random.default_rng(seed)
    item = rng.integers(ITEMS, size=USERS * EACH)
    columns = {"item": item, "label": (item % 2).astype(np.float32)}
    people = FederatedData.of([f"u{i}" for i in range(USERS)], [EACH] * USERS, columns)
    splits = {"train": people.subset(range(8)), "test": people.subset(range(8, USERS))}
    return Dataset("mine", "likes", splits, {}, inputs={"item": "item"})


def accuracy(outputs, examples):
    return float(np.mean((outputs > 0) == (examples["label"] > 0.5)))


def make_task(model=None, **changes):
    return kh.Task(model or make_model(), make_data(), metrics={"accuracy": accuracy}, **changes)


SETTINGS = {"cohort": 4, "client_lr": 0.5, "mean_over": "choosers", "progress": False}
KEYS = SPACE.keys([7, 3, 11, 20, 5])


def client(seed=0, count=11):
    rng = np.random.default_rng([9, seed])
    return {
        "item": rng.integers(0, len(KEYS), count).astype(np.int32),
        "label": rng.integers(0, 2, count).astype(np.float64),
    }


def update_of(model, settings, seed=0, keys=KEYS, trainer=None):
    slices = model.layout.select(model.init(1), keys)
    train = trainer or model.trainer(settings)
    return slices, train(slices, client(seed), np.random.default_rng(seed)).update


def by_hand(model, settings, seed=0, make_optimizer=None, factor=None):
    """The loop that people write: a module, an optimizer, batches."""
    slices = model.layout.select(model.init(1), KEYS)
    net = model.module(slices).train()
    rng, data = np.random.default_rng(seed), client(seed)
    batches = draw_batches(settings, len(data["item"]), rng)
    make = make_optimizer or (lambda p, lr: torch.optim.SGD(p, lr, momentum=settings.momentum))
    optimizer = make(list(net.named_parameters()), settings.client_lr)
    start = copy.deepcopy(dict(net.named_parameters()))
    for step, batch in enumerate(batches):
        at = batch[batch >= 0]
        tensors = {
            "item": torch.tensor(data["item"][at].astype(np.int64)),
            "label": torch.tensor(data["label"][at].astype(np.float32)),
        }
        optimizer.zero_grad()
        loss(net(tensors), tensors).backward()
        if settings.clip_norm != np.inf:
            nn.utils.clip_grad_norm_(net.parameters(), settings.clip_norm)
        for name, p in net.named_parameters():
            if p.grad is not None:
                p.grad += settings.proximal * (p.detach() - start[name].detach())
        if factor is not None:
            for group in optimizer.param_groups:
                group["lr"] = settings.client_lr * factor(step, len(batches))
        optimizer.step()
    state = net.state_dict()
    return {name: slices[name] - state[name].numpy() for name in slices}


def same_bytes(a, b):
    assert a.keys() == b.keys()
    return all(np.array_equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"epochs": 3, "momentum": 0.9},
        {"proximal": 0.3, "epochs": 2},
        {"clip_norm": 0.05},
        {"batch_size": 100},
    ],
    ids=lambda more: "-".join(more) or "plain",
)
def test_an_update_is_that_of_a_loop_by_hand(more):
    settings = ClientUpdate(**{"client_lr": 0.3, "batch_size": 4} | more)
    model = make_model()
    _, update = update_of(model, settings)
    expected = by_hand(model, settings)
    assert update.keys() == expected.keys()
    for name, value in update.items():
        assert (value.dtype, value.shape) == (np.float32, expected[name].shape)
        np.testing.assert_allclose(value, expected[name], atol=1e-6)
    assert same_bytes(update, expected) or more.keys() & {"proximal", "clip_norm"}


def test_a_client_reports_the_loss_that_its_steps_met():
    settings, model = ClientUpdate(client_lr=1e-9, batch_size=4), make_model()
    slices = model.layout.select(model.init(0), KEYS)
    told = model.trainer(settings)(slices, client(), np.random.default_rng(0)).metrics["loss"]
    whole = ClientUpdate(client_lr=1e-9, batch_size=100)
    at_once = model.trainer(whole)(slices, client(), np.random.default_rng(0)).metrics["loss"]
    assert told == pytest.approx(at_once, rel=1e-5)  # hardly a step: means of parts are the mean
    assert told > 0.1


def test_a_client_with_many_examples_trains_on_some():
    few = ClientUpdate(client_lr=0.3, batch_size=4, max_examples=3)
    model = make_model()
    slices, update = update_of(model, few)
    rng = np.random.default_rng(0)
    chosen = rng.choice(11, 3, replace=False)
    part = {name: column[chosen] for name, column in client().items()}
    whole = ClientUpdate(client_lr=0.3, batch_size=4)
    assert same_bytes(update, model.trainer(whole)(slices, part, rng).update)


def test_an_optimizer_of_your_own_has_groups_and_a_schedule():
    def adam(named, lr):
        vectors = [p for name, p in named if name.startswith("items")]
        rest = [p for name, p in named if not name.startswith("items")]
        return torch.optim.AdamW([{"params": vectors, "weight_decay": 0.1}, {"params": rest}], lr)

    def warm_up(step, steps):
        return (step + 1) / steps

    settings = ClientUpdate(client_lr=0.01, batch_size=4, epochs=2)
    model = make_model(optimizer=adam, schedule=warm_up)
    _, update = update_of(model, settings)
    expected = by_hand(model, settings, make_optimizer=adam, factor=warm_up)
    for name, value in update.items():
        np.testing.assert_allclose(value, expected[name], atol=1e-6)
    assert not same_bytes(update, update_of(make_model(optimizer=adam), settings)[1])


def test_a_model_clips_gradients_as_settings_do():
    settings = ClientUpdate(client_lr=0.3, batch_size=4)
    _, clipped = update_of(make_model(clip_norm=0.05), settings)
    told = ClientUpdate(client_lr=0.3, batch_size=4, clip_norm=0.05)
    assert same_bytes(clipped, update_of(make_model(), told)[1])
    assert not same_bytes(clipped, update_of(make_model(), settings)[1])
    with pytest.raises(InputError, match="clip_norm is out of range: got 0"):
        make_model(clip_norm=0)


def test_momentum_beside_an_optimizer_of_your_own_is_refused():
    model = make_model(optimizer=lambda named, lr: torch.optim.SGD([p for _, p in named], lr))
    with pytest.raises(InputError, match="momentum is set beside an optimizer"):
        model.trainer(ClientUpdate(client_lr=0.1, momentum=0.5))


def test_sparse_gradients_make_the_same_update():
    class Sparse(Net):
        def __init__(self, item):
            super().__init__(item)
            self.items = nn.Embedding(item, 4, sparse=True)

    for more in ({}, {"momentum": 0.5}, {"clip_norm": 0.05}, {"proximal": 0.2}):
        settings = ClientUpdate(client_lr=0.3, batch_size=4, **more)
        sparse = kh.torch.Model(Sparse, loss, CUT)
        dense = make_model()
        slices = dense.layout.select(dense.init(1), KEYS)
        updates = [
            m.trainer(settings)(slices, client(), np.random.default_rng(0)).update
            for m in (sparse, dense)
        ]
        for name in slices:
            np.testing.assert_allclose(updates[0][name], updates[1][name], atol=1e-6)


def test_modules_are_made_once_for_a_number_of_keys():
    made = []

    def make_net(item):
        made.append(item)
        return Net(item)

    model = kh.torch.Model(make_net, loss, CUT)
    train = model.trainer(ClientUpdate(client_lr=0.1))
    for seed in range(5):
        update_of(model, None, seed, trainer=train)
    assert made.count(len(KEYS)) == 1
    update_of(model, None, keys=SPACE.keys(range(9)), trainer=train)
    assert made.count(9) == 1


def test_a_client_leaves_nothing_behind_in_its_module():
    model = make_model({"norm": True})
    settings = ClientUpdate(client_lr=0.3, batch_size=4, momentum=0.5)
    train = model.trainer(settings)
    _, first = update_of(model, settings, seed=1, trainer=train)
    update_of(model, settings, seed=2, trainer=train)
    assert same_bytes(first, update_of(model, settings, seed=1, trainer=train)[1])


def test_statistics_are_averaged_and_counters_stay_at_home():
    model = make_model({"norm": True})
    slices, update = update_of(model, ClientUpdate(client_lr=0.3, batch_size=4))
    assert {"norm.running_mean", "norm.running_var"} <= slices.keys()
    assert "norm.num_batches_tracked" not in slices
    assert update["norm.running_mean"].any()
    assert same_bytes(update, by_hand(model, ClientUpdate(client_lr=0.3, batch_size=4)))
    run = kh.train(make_task(make_model({"norm": True})), rounds=3, m=6, **SETTINGS)
    assert (run.model()["norm.running_var"] > 0).all()
    assert (run.model()["norm.running_var"] != 1).any()


class Tied(nn.Module):
    """Words in, words out, one table for both."""

    def __init__(self, item):
        super().__init__()
        self.words = nn.Embedding(item, 4)
        self.head = nn.Linear(4, item, bias=False)
        self.head.weight = self.words.weight

    def forward(self, batch):
        return self.head(self.words(batch["item"]))


def next_word(outputs, batch):
    return functional.cross_entropy(outputs, batch["next"])


@pytest.mark.parametrize(
    "axes", [{"words.weight": 0}, {"head.weight": 0}, {"words.weight": 0, "head.weight": 0}]
)
def test_tied_tensors_are_sent_once(axes):
    model = kh.torch.Model(Tied, next_word, [kh.Cut(SPACE, axes)])
    assert list(model.init(0)) == ["words.weight"]
    assert model.layout.client_size(item=5) == 5 * 4
    slices = model.layout.select(model.init(0), KEYS)
    data = {"item": np.array([0, 1, 4]), "next": np.array([1, 4, 0])}
    settings = ClientUpdate(client_lr=0.5)
    update = model.trainer(settings)(slices, data, np.random.default_rng(0)).update
    table = torch.tensor(slices["words.weight"], requires_grad=True)
    at = torch.tensor(data["item"])
    functional.cross_entropy(table[at] @ table.T, torch.tensor(data["next"])).backward()
    np.testing.assert_allclose(update["words.weight"], 0.5 * table.grad.numpy(), atol=1e-6)
    module = model.module(slices)
    assert module.head.weight is module.words.weight


@pytest.mark.parametrize(
    ("cuts", "said"),
    [
        ([kh.Cut(SPACE, {"words.weight": 0, "head.weight": 1})], "axes 0 and 1"),
        (
            [kh.Cut(SPACE, {"words.weight": 0}), kh.Cut(kh.KeySpace("b", 40), {"head.weight": 0})],
            "key spaces 'item' and 'b'",
        ),
    ],
)
def test_tied_tensors_that_are_cut_differently_are_refused(cuts, said):
    with pytest.raises(CutError, match=f"'words.weight' and 'head.weight' are one tensor .*{said}"):
        _ = kh.torch.Model(lambda item, b=0: Tied(item), next_word, cuts).layout


def test_frozen_layers_are_no_parameters_and_the_same_everywhere():
    model = make_model({"frozen": True})
    assert not any(name.startswith("base") for name in model.init(0))
    nets = [model.module(model.layout.select(model.init(s), KEYS)) for s in (0, 1)]
    whole = model.module(model.init(5))
    for net in nets:
        assert torch.equal(net.base.weight, whole.base.weight)
    assert nets[0].base.weight.data_ptr() == nets[1].base.weight.data_ptr()
    before = whole.base.weight.clone()
    kh.train(make_task(model), rounds=2, m=6, **SETTINGS)
    assert torch.equal(before, whole.base.weight)


@pytest.mark.parametrize("how", [{}, {"frozen": ["items.*", "base.*"]}], ids=["asks", "named"])
def test_a_frozen_tensor_that_is_cut_is_cut_for_the_client_and_not_in_its_update(how):
    class Frozen(Net):
        def __init__(self, item):
            super().__init__(item)
            if not how:
                self.items.requires_grad_(False)
                self.base.requires_grad_(False)

    model, settings = kh.torch.Model(Frozen, loss, CUT, **how), ClientUpdate(client_lr=0.3)
    trained = kh.torch.Model(Net, loss, CUT)
    train = model.trainer(settings)
    params = model.init(0)
    assert params.keys() == {"out.weight", "out.bias"}
    assert model.frozen_leaves.layout.client_size(item=5) == 5 * 4 + 20
    slices = model.layout.select(params, KEYS)
    with pytest.raises(InputError, match="must be told its keys: got none beside parameters"):
        train(slices, client(), np.random.default_rng(0))
    keys = {"item": KEYS}
    update = train.for_keys(keys)(slices, client(), np.random.default_rng(0)).update
    # The first step is one of the same module with everything trained; later ones are not.
    one = ClientUpdate(client_lr=0.3, batch_size=100)
    first = model.trainer(one).for_keys(keys)(slices, client(), np.random.default_rng(0)).update
    everything = trained.layout.select(trained.init(0), KEYS)
    whole = trained.trainer(one)(everything, client(), np.random.default_rng(0)).update
    assert all(np.array_equal(first[name], whole[name]) for name in params)
    assert update.keys() == params.keys()
    assert update["out.weight"].any()
    with pytest.raises(CutError, match="frozen names no parameter of the module: got 'bose"):
        _ = kh.torch.Model(Net, loss, CUT, frozen=["bose.*"]).layout
    with pytest.raises(CutError, match="nothing of the module is trained: got 5 frozen"):
        _ = kh.torch.Model(Net, loss, CUT, frozen=["*"]).layout


def test_predictions_are_those_of_the_module():
    model = make_model({"dropout": 0.5, "norm": True})
    params, data = model.init(0), client()
    net = model.module(params)
    batch = {"item": torch.tensor(data["item"].astype(np.int64))}
    expected = net(batch).detach().numpy()
    np.testing.assert_array_equal(model.predict(params, data), expected)
    locked = {name: array.copy() for name, array in params.items()}
    for array in locked.values():
        array.setflags(write=False)
    np.testing.assert_array_equal(model.predict(locked, data), expected)


def test_a_net_in_bfloat16_sends_float32():
    model = kh.torch.Model(lambda item: Net(item).bfloat16(), loss, CUT)
    slices, update = update_of(model, ClientUpdate(client_lr=0.3))
    assert {a.dtype for a in (*slices.values(), *update.values())} == {np.dtype(np.float32)}
    assert model.predict(slices, client()).dtype == np.float32


def test_rows_of_unequal_length_are_padded():
    class Bags(nn.Module):
        def __init__(self, item):
            super().__init__()
            self.items = nn.Embedding(item, 1)

        def forward(self, batch):
            known = batch["item"] >= 0
            return (self.items(batch["item"].clamp(min=0))[..., 0] * known).sum(1)

    model = kh.torch.Model(Bags, loss, CUT)
    params = model.init(0)
    rows = Ragged.of([[1, 2], [], [3]])
    table = params["items.weight"][:, 0]
    expected = [table[1] + table[2], 0, table[3]]
    np.testing.assert_allclose(model.predict(params, {"item": rows}), expected, atol=1e-6)


def test_a_model_and_its_trainer_can_be_sent_to_another_process():
    model = kh.torch.Model(Net, loss, CUT)
    train = model.trainer(ClientUpdate(client_lr=0.3))
    _, update = update_of(model, None, trainer=train)
    copied = pickle.loads(pickle.dumps(train))
    assert same_bytes(update, update_of(model, None, trainer=copied)[1])


def test_it_is_a_model_that_trains_itself():
    assert isinstance(make_model(), TrainsItself)
    assert kh.jax.Model is kh.Model


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (
            lambda: make_model().trainer(ClientUpdate(client_lr=1))(
                make_model().layout.select(make_model().init(0), KEYS),
                {"item": np.empty(0, int), "label": np.empty(0)},
                np.random.default_rng(0),
            ),
            InputError,
            "a client has no examples",
        ),
        (
            lambda: update_of(
                kh.torch.Model(lambda item: Net(ITEMS), loss, CUT), ClientUpdate(client_lr=1)
            ),
            ShapeError,
            r"'items.weight' of shape \(40, 4\) from make_net\(item=5\); expected \(5, 4\)",
        ),
        (
            lambda: kh.torch.Model(Net, loss, [kh.Cut(SPACE, {"item.weight": 0})]).layout,
            CutError,
            r"got 'item.weight'; .*did you mean items.weight\?",
        ),
        (lambda: kh.torch.Model(lambda: Net(3), loss, CUT), InputError, "make_net does not take"),
        (lambda: kh.torch.Model(lambda item: 3, loss, CUT).layout, InputError, "made no module"),
        (
            lambda: update_of(
                kh.torch.Model(Net, lambda out, batch: out, CUT), ClientUpdate(client_lr=1)
            ),
            InputError,
            r"the loss is no scalar tensor: got shape \(11,\)",
        ),
        (
            lambda: make_model(forward=lambda net, batch: (net(batch),)).predict(
                make_model().init(0), client()
            ),
            InputError,
            "outputs are no tensor: got tuple",
        ),
    ],
)
def test_a_mistake_is_named(make, error, said):
    with pytest.raises(error, match=said):
        make()


def test_without_torch_one_is_told_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(InputError, match=r"PyTorch is not installed.*keyhole\[torch\]"):
        make_model()
