"""Rounds of a PyTorch recommender against a loop written by hand, one thread, CPU time.

    python benchmarks/torch_clients.py [--check] [--quick] [--json]

Both sides make whole rounds in one process and take turns: choose keys, fetch slices, train one
epoch per client, add updates up, step. By hand means plain PyTorch with one module that is loaded
for each client, `torch.optim.SGD`, and sums kept in tensors. The ratio is CPU time by hand over
ours; the goals are 0.9 with select and 0.7 without.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import keyhole as kh
from harness import Goal, left_out, measure, parser, run_steps
from keyhole.arrays import keep_freed_memory
from keyhole.data.federated import Dataset, FederatedData
from keyhole.identity import Ref
from keyhole.rounds.cores import use_one_thread

try:
    import torch
    from torch import nn
    from torch.nn.functional import binary_cross_entropy_with_logits
except ImportError:
    left_out("all of this, without PyTorch", "pip install 'keyhole[torch]'")
    sys.exit(0)

RESULTS = Path(__file__).parent / "results" / "torch_clients.json"
WIDTH, EXAMPLES, BATCH, RATE = 32, 100, 20, 0.1


class Recommender(nn.Module):
    """A vector for each item and a small network that all share."""

    def __init__(self, item: int, sparse: bool = False) -> None:
        super().__init__()
        self.items = nn.Embedding(item, WIDTH, sparse=sparse)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.out(torch.relu(self.hidden(self.items(batch["item"]))))[:, 0]


def make_sparse(item: int) -> Recommender:
    return Recommender(item, sparse=True)


def loss(outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return binary_cross_entropy_with_logits(outputs, batch["label"])


@dataclass(frozen=True)
class Cell:
    """CPU seconds of a round, ours and by hand; the ratio that was promised."""

    name: str
    items: int
    keys: int
    clients: int
    keyhole_cpu: float
    hand_cpu: float
    at_least: float

    @property
    def ratio(self) -> float:
        return self.hand_cpu / self.keyhole_cpu

    def goals(self) -> list[Goal]:
        return [Goal(f"CPU time by hand over ours, {self.name}", self.ratio, self.at_least)]


def make_data(items: int, clients: int) -> Dataset:
    """Every client likes some of its 100 examples, of items that are drawn for it."""
    rng = np.random.default_rng(0)
    item = rng.integers(items, size=clients * EXAMPLES)
    columns = {"item": item, "label": (item % 2).astype(np.float32)}
    people = FederatedData.of(list(map(str, range(clients))), [EXAMPLES] * clients, columns)
    return Dataset("items", "likes", {"train": people, "test": people}, {}, inputs={"item": "item"})


def by_keyhole(data: Dataset, make_net: Callable, items: int, m: int | None, cohort: int):
    space = kh.KeySpace("item", items)
    model = kh.torch.Model(make_net, loss, cuts=[kh.Cut(space, {"items.weight": 0})])
    task = kh.Task(model, data)
    changes = {"cohort.size": cohort, "client.lr": RATE, "client.batch_size": BATCH}
    if m is not None:
        changes |= {"keys.item.count": m, "keys.item.choice": Ref("top")}
    spec = task.defaults.changed(changes | {"rounds": 10**6})
    run = kh.Experiment(spec, data, {"task": task.kind}).start(0, None)
    return lambda: list(run.rounds(run.next_round + 1))


def by_hand(data: Dataset, make_net: Callable, items: int, m: int | None, cohort: int):
    """FedAvg as it is written in plain PyTorch; with m, on the rows of a client's top items."""
    torch.manual_seed(0)
    server = {name: p.detach().clone() for name, p in make_net(items).named_parameters()}
    net = make_net(items if m is None else m)
    train, rng = data.splits["train"], np.random.default_rng(0)

    def one_round() -> None:
        total = {name: torch.zeros_like(tensor) for name, tensor in server.items()}
        for client in rng.choice(len(train), cohort, replace=False):
            own = train.client(int(client))
            keys, start = None, server
            item = own["item"]
            if m is not None:
                distinct, counts = np.unique(item, return_counts=True)
                keys = np.sort(distinct[np.argsort(-counts, kind="stable")[:m]])
                kept = np.isin(item, keys)
                own = {name: column[kept] for name, column in own.items()}
                item = np.searchsorted(keys, own["item"])
                keys = torch.from_numpy(keys)
                start = {**server, "items.weight": server["items.weight"][keys]}
            columns = {"item": torch.from_numpy(item), "label": torch.from_numpy(own["label"])}
            end = train_client(net if m is None else sized(len(keys)), start, columns, rng)
            for name, tensor in end.items():
                change = start[name] - tensor.detach()
                if keys is not None and name == "items.weight":
                    total[name].index_add_(0, keys, change)
                else:
                    total[name] += change
        for name in server:
            server[name] -= total[name] / cohort

    made: dict[int, nn.Module] = {}

    def sized(count: int) -> nn.Module:
        if count not in made:
            made[count] = make_net(count)
        return made[count]

    return one_round


def train_client(net: nn.Module, start: dict, columns: dict, rng: np.random.Generator) -> dict:
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            parameter.copy_(start[name])
    sgd = torch.optim.SGD(net.parameters(), lr=RATE)
    order = torch.from_numpy(rng.permutation(len(columns["item"])))
    for at in order.split(BATCH):
        batch = {name: column[at] for name, column in columns.items()}
        sgd.zero_grad()
        loss(net(batch), batch).backward()
        sgd.step()
    return dict(net.named_parameters())


def measure_cell(
    name: str, make_net: Callable, items: int, m: int | None, cohort: int, at_least: float
) -> Cell:
    data = make_data(items, 4 * cohort)
    times = measure(
        {
            "ours": by_keyhole(data, make_net, items, m, cohort),
            "hand": by_hand(data, make_net, items, m, cohort),
        }
    )
    ours, hand = times["ours"].cpu, times["hand"].cpu
    return Cell(name, items, items if m is None else m, cohort, ours, hand, at_least)


def main() -> int:
    flags = parser(__doc__.splitlines()[0], RESULTS).parse_args()
    keep_freed_memory()  # as a run does; it serves both sides
    use_one_thread()
    torch.set_num_threads(1)
    items = 20_000 if flags.quick else 200_000
    cells = [
        ("m=50", Recommender, items, 50, 50, 0.9),
        ("m=all", Recommender, items, None, 10, 0.7),
        ("m=all, sparse gradients", make_sparse, items, None, 10, 0.7),
    ]
    steps = [(cell[0], lambda cell=cell: measure_cell(*cell)) for cell in cells]
    return run_steps(flags, "torch_clients", steps)


if __name__ == "__main__":
    sys.exit(main())
