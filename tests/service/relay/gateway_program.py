"""A slice service with a gateway, as a program of its own that notes who connects to it.

python gateway_program.py DIRECTORY TOKEN_KEY GATEWAY_KEY NOTES
"""

import sys
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

from keyhole.delivery.relay.ohttp import load_gateway_keys
from keyhole.service.access import Access, Keyring
from keyhole.service.app import App
from keyhole.service.gateway import gateway_routes
from keyhole.service.reading import RoundsDirectory
from keyhole.service.spool import UpdateSpool
from keyhole.service.transport import serving
from keyhole.wire.assignment import Pace, admit


class Noting:
    """Writes the address, method and path of each request to a file."""

    def __init__(self, app, notes):
        self.app, self.limits, self.metrics = app, app.limits, app.metrics
        self.notes = notes

    async def __call__(self, scope, receive, send):
        self.notes.write(f"{scope['client'][0]} {scope['method']} {scope['path']}\n")
        await self.app(scope, receive, send)


@contextmanager
def gateway_service(directory, token_key, gateway_key, notes):
    """Serves; gives the URL."""
    rounds = RoundsDirectory(directory)
    app = App(
        rounds,
        access=Access(Keyring.load(token_key)),
        spool=UpdateSpool(directory / "updates"),
        admit=partial(admit, pace=Pace(spread=0.0), uniform=lambda: 0.0),
        extra_routes=[gateway_routes(rounds, load_gateway_keys(gateway_key))],
    )
    with (
        closing(rounds),
        notes.open("a", buffering=1) as written,
        serving(Noting(app, written)) as url,
    ):
        yield url


def main(*paths):
    with gateway_service(*paths) as url:
        print(url, flush=True)
        sys.stdin.read()  # until the test closes it


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
