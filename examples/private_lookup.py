"""Looks up embeddings of a trained model that a service has published, without saying which.

    python examples/private_lookup.py

The service runs as a process of its own, once as the only server and once as one of two. Both ways
bring the same rows; they differ in bytes and in what they assume. A table as small as this one is
soon cheaper to download whole, which tells nobody anything either.
"""

import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from private_fetch import start

import keyhole as kh
from keyhole.device.device import Device
from keyhole.device.lookup import Lookup, queried_from
from keyhole.server.optimizers import SGD
from keyhole.server.state import ServerState
from keyhole.service.publishing import Publisher

WORDS, NUMBERS, MAX_KEYS = 5_000, 64, 20
WORD = kh.KeySpace("word", WORDS)
EMBEDDINGS = np.random.default_rng(0).normal(size=(WORDS, NUMBERS)).astype(np.float32)
MODEL = {"embeddings": EMBEDDINGS}
LAYOUT = kh.Layout.of(MODEL, kh.Cut(WORD, {"embeddings": 0}))
SENTENCE = [7, 42, 1860, 4999]  # the words that nobody is to learn


def show(look, servers):
    """Two calls: what does not change within a round is fetched by the first alone."""
    spent = []
    for call in ("first", "second"):
        found = look({"word": SENTENCE})
        if not np.array_equal(found.arrays["embeddings"], EMBEDDINGS[found.keys["word"]]):
            sys.exit("other rows than were asked for")
        print(
            f"{servers} server(s), {call} call: {found.bytes_up:,} bytes sent, "
            f"{found.bytes_down:,} received, {len(found.keys['word'])} rows"
        )
        spent.append(found.bytes_up + found.bytes_down)
    calls = 1 + (found.model_bytes - spent[0]) // spent[1]
    print(f"{calls} calls cost less than the whole table of {found.model_bytes:,} bytes")


def main():
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        publisher = stack.enter_context(Publisher(folder))
        state = ServerState.dense(LAYOUT, MODEL, SGD(1.0))
        publisher.publish_state(state, number=0, settings={"keys_per_client": {"word": MAX_KEYS}})

        # To look at: a service that is deployed answers devices with a token.
        urls = {
            role: start(stack, "serve", folder, "--pir", role, "--open-queries")
            for role in ("one", "0", "1")
        }
        for roles in (["one"], ["0", "1"]):
            print(f"{len(roles)} server(s), assuming: {queried_from(len(roles)).about.rests_on}")
            with Lookup(*[Device(urls[role]) for role in roles]) as look:
                show(look, len(roles))


if __name__ == "__main__":
    main()
