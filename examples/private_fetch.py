"""Three ways to fetch the same slices: in the clear, through a blind relay, from two servers.

    python examples/private_fetch.py

Two slice services and a relay run as processes of their own, as two operators would run them. All
three ways bring the same bytes; they differ in what they cost and in who learns what.
"""

import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import numpy as np

import keyhole as kh
from keyhole.delivery import delivery_named
from keyhole.delivery.pir.two_server import TwoServerPir
from keyhole.device.device import Device
from keyhole.device.private import QueryFetch
from keyhole.device.relayed import RelayedFetch
from keyhole.server.optimizers import SGD
from keyhole.server.state import ServerState
from keyhole.service.publishing import Publisher

WORDS, NUMBERS, MAX_KEYS = 5_000, 64, 100
WORD = kh.KeySpace("word", WORDS)
MODEL = {"kernel": np.arange(WORDS * NUMBERS, dtype=np.float32).reshape(WORDS, NUMBERS)}
LAYOUT = kh.Layout.of(MODEL, kh.Cut(WORD, {"kernel": 0}))


COMMAND = [
    sys.executable,
    "-c",
    "import sys; from keyhole.cli.main import main; main(sys.argv[1:])",
]


def start(stack, *arguments):
    """Starts a `keyhole` command that listens; returns its address."""
    process = subprocess.Popen(
        [*COMMAND, *map(str, arguments), "--port", "0"], stderr=subprocess.PIPE, text=True
    )
    stack.callback(process.communicate)
    stack.callback(process.terminate)
    assert process.stderr is not None
    line = process.stderr.readline()
    if " at http" not in line:
        sys.exit(f"{arguments[0]} did not start: {line.strip()}")
    return line.split()[-1]


def show(way, fetched, expected):
    traffic = fetched.traffic
    same = np.array_equal(fetched.model["kernel"], expected)
    print(f"{way}: {traffic.bytes_up:,} bytes sent, {traffic.bytes_down:,} received")
    print(f"  the slices that were asked for: {same}")
    for party, learned in delivery_named(way).about.leaks.items():
        print(f"  {party}: {learned}")


def main():
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        key = folder / "gateway.key"
        subprocess.run(
            [*COMMAND, "token", "gateway-key", str(key)], check=True, capture_output=True
        )
        publisher = stack.enter_context(Publisher(folder / "rounds"))
        state = ServerState.dense(LAYOUT, MODEL, SGD(1.0))
        told = {"keys_per_client": {"word": MAX_KEYS}}  # public: every request is padded to it
        round_id = publisher.publish_state(state, number=0, settings=told).id

        rounds = folder / "rounds"
        # To look at: a service that is deployed answers devices with a token of the round.
        is_open = "--open-queries"
        first = start(stack, "serve", rounds, "--pir", "0", is_open, "--gateway-key", key)
        second = start(stack, "serve", rounds, "--pir", "1", is_open)
        alone = "--open", "--mix-min", "1", "--mix-ms", "10"  # there is one device to look at
        relay = start(stack, "relay", "--gateway", first, *alone)

        device = stack.enter_context(Device(first))
        from_second = stack.enter_context(Device(second))
        through = stack.enter_context(Device(relay))
        keys = {"word": np.random.default_rng(0).choice(WORDS, MAX_KEYS, replace=False)}
        expected = MODEL["kernel"][keys["word"]]
        show("pregenerated", device.fetch(round_id, keys), expected)
        show("relay", RelayedFetch(through.client)(device, round_id, keys), expected)
        show("pir", QueryFetch(TwoServerPir(), (from_second,))(device, round_id, keys), expected)


if __name__ == "__main__":
    main()
