"""A ServerApp that asks all nodes for a reply, round after round, and writes how long it takes."""

from __future__ import annotations

import json
import time
from pathlib import Path

from flwr.app import Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

LOOK = 0.1  # seconds between two looks at replies, where Flower's own strategies wait for 3

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    told = context.run_config
    while len(nodes := list(grid.get_node_ids())) < told["min-nodes"]:
        time.sleep(0.5)
    seconds = []
    for _ in range(told["rounds"]):
        began = time.perf_counter()
        messages = [Message(RecordDict(), node, "query") for node in nodes]
        sent, replies = set(grid.push_messages(messages)), []
        while sent:
            for reply in grid.pull_messages(sent):
                sent.discard(reply.metadata.reply_to_message_id)
                replies.append(reply)
            time.sleep(LOOK)
        seconds.append(time.perf_counter() - began)
        if any(reply.has_error() for reply in replies):
            raise RuntimeError("a node did not reply")
    written = Path(told["results"])
    written.with_suffix(".tmp").write_text(json.dumps(seconds))
    written.with_suffix(".tmp").rename(written)
