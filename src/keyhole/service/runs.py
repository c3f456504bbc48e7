"""Serves several runs from one folder: the rounds of run NAME lie in FOLDER/NAME, and its URLs
begin with /runs/NAME.

What lies in the folder itself is the run without a name, whose URLs begin with nothing. A run is
there as soon as its trainer has made its folder: no service is restarted for it. Runs share the
budgets of a service, and nothing else: each has rounds, check-ins and updates of its own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path

from keyhole.errors import KeyholeError, NotFoundError
from keyhole.service.app import App
from keyhole.service.routes import Receive, Scope, Send, error_response, send_response
from keyhole.service.status import has_rounds, is_run_name, run_names

_RUNS, _READY = b"/runs/", b"/readyz"


class RunsApp:
    """All runs of a folder.

    Args:
        own: answers for what lies in the folder itself, and all that is about no run.
        make: makes what answers for a run of a name, when it is asked for the first time.
    """

    def __init__(self, own: App, folder: Path, make: Callable[[str], App]) -> None:
        self.limits, self.metrics = own.limits, own.metrics
        self._own, self._folder, self._make = own, folder, make
        self._apps: dict[str, App] = {}

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Answers one request, as ASGI defines it."""
        if scope["type"] != "http":
            return self._own(scope, receive, send)
        path = scope.get("raw_path") or scope["path"].encode("utf-8", "replace")
        app = self._own
        try:
            if path.startswith(_RUNS):
                name, slash, rest = path.removeprefix(_RUNS).partition(b"/")
                app = self._app(name.decode("latin-1"))
                scope["raw_path"] = slash + rest
            elif path == _READY and not has_rounds(self._folder):
                app = next(self._ready_ones(), self._own)
        except KeyholeError as error:
            return self._refuse(error, scope, send)
        return app(scope, receive, send)

    async def _refuse(self, error: KeyholeError, scope: Scope, send: Send) -> None:
        self.metrics.refuse(type(error).__name__)
        await send_response(error_response(error), scope, send)

    def _ready_ones(self) -> Iterator[App]:
        """What answers for runs that have a round; those that are damaged are passed over."""
        for name in run_names(self._folder):
            with suppress(KeyholeError):
                app = self._app(name)
                app.current_round()
                yield app

    def _app(self, name: str) -> App:
        """What answers for a run; raises NotFoundError where there is no such run."""
        if name not in self._apps:
            if not (is_run_name(name) and has_rounds(self._folder / name)):
                raise NotFoundError(
                    "no such run: got another name; expected a run whose trainer was started; "
                    "check the name behind /runs/, or start the trainer first"
                )
            self._apps[name] = self._make(name)
        return self._apps[name]
