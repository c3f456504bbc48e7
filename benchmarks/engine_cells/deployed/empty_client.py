"""A ClientApp that replies at once."""

from __future__ import annotations

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.query()
def query(message: Message, _context: Context) -> Message:
    return Message(RecordDict(), reply_to=message)
