"""The job as a Flower app: an executor over Flower's grid, and the ClientApp that trains.

The round is ours, step by step the one that runs on Ray; only where clients train differs. Their
slices and updates travel in Flower's messages, as arrays of NumPy.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cache

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from engine_cells.crowd import Crowd
from keyhole import tree
from keyhole.arrays import Tree
from keyhole.rounds.clients import ClientJob, Clients
from keyhole.sampling import generator

PATIENCE = 300.0  # seconds for a round
POLL = 0.005  # seconds between two looks at replies; Flower's own `send_and_receive` takes 0.1

app = ClientApp()
# Kept by its process: the population is built, and training compiled, once in each of Ray's actors.
population = cache(Crowd.__call__)


@app.train()
def train(message: Message, _context: Context) -> Message:
    """Trains one client with the slices of the message."""
    told = message.content["job"]
    clients = population(Crowd(*(int(n) for n in told["crowd"][:2]), bool(told["crowd"][2])))
    leaves = {path: array.numpy() for path, array in message.content["slices"].items()}
    submodel = _nest(leaves)
    data = clients.data(int(told["client"]))
    update = clients.train(submodel, data, generator(*told["seed_path"]))
    return Message(RecordDict({"update": _record(update)}), reply_to=message)


class OnGrid:
    """An executor: one message to one node for each client, and its reply.

    Args:
        grid: of the ServerApp.
        crowd: who takes part; as many nodes as clients.
    """

    def __init__(self, grid: Grid, crowd: Crowd) -> None:
        self._grid = grid
        self._crowd = [crowd.clients, crowd.keys_per_client, int(crowd.is_idle)]
        until = time.monotonic() + PATIENCE
        while len(list(grid.get_node_ids())) < crowd.clients:
            if time.monotonic() > until:
                raise SystemExit("Flower's nodes did not come")
            time.sleep(0.1)
        self._nodes = sorted(grid.get_node_ids())

    def __call__(self, _clients: Clients, jobs: Sequence[ClientJob]) -> list[Tree]:
        """Pushes all messages, then pulls replies as they come."""
        pushed = self._grid.push_messages([self._message(job) for job in jobs])
        places = {message: place for place, message in enumerate(pushed)}
        updates: list[Tree] = [None] * len(jobs)
        until = time.monotonic() + PATIENCE
        while places:
            for reply in self._grid.pull_messages(list(places)):
                place = places.pop(reply.metadata.reply_to_message_id)
                if reply.has_error():
                    raise SystemExit(f"a client failed: {reply.error.reason}")
                found = {path: a.numpy() for path, a in reply.content["update"].items()}
                updates[place] = _nest(found)
            if time.monotonic() > until:
                raise SystemExit("replies did not come")
            time.sleep(POLL if places else 0.0)
        return updates

    def _message(self, job: ClientJob) -> Message:
        told = {"crowd": self._crowd, "client": job.client, "seed_path": list(job.seed_path)}
        content = RecordDict({"job": ConfigRecord(told), "slices": _record(job.submodel)})
        return Message(content, self._nodes[job.client], "train")


def _record(value: Tree) -> ArrayRecord:
    return ArrayRecord({path: Array(leaf) for path, leaf in tree.flatten(value).items()})


def _nest(leaves: dict[str, Tree]) -> Tree:
    """A tree of dictionaries from paths of two names."""
    nested: dict[str, dict[str, Tree]] = {}
    for path, leaf in leaves.items():
        name, _, field = path.partition("/")
        nested.setdefault(name, {})[field] = leaf
    return nested
