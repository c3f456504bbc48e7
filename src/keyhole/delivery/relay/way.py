"""A blind relay as a delivery, in process: the same sealed requests as on a wire."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from keyhole.arrays import ClientId, KeyArray
from keyhole.delivery.base import PARTIES, Learned
from keyhole.delivery.exchange import PrivateTable, Tally
from keyhole.delivery.pir.messages import Retrieved
from keyhole.delivery.relay.client import BlindClient, TableShape, slice_handler
from keyhole.delivery.relay.gateway import Gateway, Relay
from keyhole.delivery.relay.ohttp import GatewayKey


@dataclass(frozen=True)
class BlindRelay:
    """Retrieval by Oblivious HTTP: one sealed request for each key, mixed over the cohort."""

    @property
    def seen_by(self) -> Mapping[str, Learned]:
        """The relay learns who takes part, the gateway which keys somebody asks for."""
        return PARTIES["relay"].seen_by

    def retrieve(
        self, table: PrivateTable, wanted: Mapping[ClientId, KeyArray], tally: Tally
    ) -> Mapping[ClientId, Retrieved]:
        """All clients ask; the relay mixes their requests before the gateway opens them."""
        key = GatewayKey.fresh()
        gateway = Gateway([key], slice_handler(table.round_id, [table.records]))
        num_keys, record_bytes = table.records.shape
        shape = TableShape(0, num_keys, record_bytes, table.max_keys)
        client_side = BlindClient(key.config, table.round_id, [shape])
        questions = {client: client_side.ask([keys]) for client, keys in wanted.items()}
        sent = [question.messages() for question in questions.values()]
        answers = Relay(gateway.answer_many).forward_many(sent)
        found = {}
        for (client, question), up, down in zip(questions.items(), sent, answers, strict=True):
            tally.add(client, sum(map(len, down)), sum(map(len, up)))
            (records,) = question.open(down)
            found[client] = Retrieved(records, np.ones(len(records), bool))
        return found
