"""A grid that hands messages to ClientApps in threads of this process, as bytes, like a SuperLink.

Nodes can be silent, and messages end with their time to live: what the real ones do, without the
seconds that processes take.
"""

import threading
import time

from flwr.app import Context, Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.serverapp import Grid


def over_the_wire(message):
    """The message as its receiver gets it, and how many bytes it took."""
    body = message_to_proto(message).SerializeToString()
    return message_from_proto(ProtoMessage.FromString(body)), len(body)


class InProcessGrid(Grid):
    """Nodes are (app, node config, run config) by their number; those in `silent` say nothing."""

    def __init__(self, nodes):
        self.nodes = dict(nodes)
        self.silent = set()
        self.twice = False  # whether every message arrives twice
        self.tells_expiry = True
        self.clock = time.monotonic
        self.sizes = []
        self.pushed = []  # (node, type, ttl)
        self._replies, self._until = {}, {}
        self._threads = []

    def set_run(self, run):
        raise NotImplementedError

    @property
    def run(self):
        raise NotImplementedError

    def create_message(self, *args, **kwargs):
        raise NotImplementedError

    def send_and_receive(self, messages, *, timeout=None):
        raise AssertionError("waits for all replies")

    def get_node_ids(self):
        return list(self.nodes)

    def push_messages(self, messages):
        names = []
        for message in messages:
            name = message.metadata.__dict__["_message_id"] = message.object_id
            node, ttl = message.metadata.dst_node_id, message.metadata.ttl
            arrived, size = over_the_wire(message)
            arrived.metadata.__dict__["_message_id"] = name
            self.sizes.append(size)
            self.pushed.append((node, message.metadata.message_type, ttl))
            self._until[name] = (self.clock() + ttl, message)
            if node not in self.silent:
                thread = threading.Thread(target=self._deliver, args=(name, node, arrived))
                self._threads.append(thread)
                thread.start()
            names.append(name)
        return names

    def pull_messages(self, message_ids):
        found = []
        for name in message_ids:
            until, asked = self._until[name]
            if name in self._replies:
                found.append(self._replies.pop(name))
            elif self.clock() >= until and self.tells_expiry:
                gone = Error(ErrorCode.REPLY_MESSAGE_UNAVAILABLE, "expired")
                found.append(Message(gone, reply_to=asked))
        return found

    def expire(self, node):
        """Ends the time of all messages to a node."""
        for name, (_, message) in self._until.items():
            if message.metadata.dst_node_id == node:
                self._until[name] = (0.0, message)

    def close(self):
        for thread in self._threads:
            thread.join()

    def _deliver(self, name, node, message):
        app, node_config, run_config = self.nodes[node]
        context = Context(1, node, node_config, RecordDict(), run_config)
        if self.twice:
            app(message, context)
        reply, size = over_the_wire(app(message, context))
        self.sizes.append(size)
        self._replies[name] = reply
