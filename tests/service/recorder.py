"""What arrives at a service, kept as it arrives."""

from keyhole.service.routes import WHOLE_BODY


class Recorder:
    """An application that passes everything on, and keeps what arrived: (method, path, body)."""

    def __init__(self, app):
        self.app, self.seen = app, []

    def __getattr__(self, name):
        return getattr(self.app, name)

    async def __call__(self, scope, receive, send):
        body = bytearray(scope.get(WHOLE_BODY, b""))  # short ones come with the head
        told = [scope.get("method"), scope.get("path"), scope.get("query_string"), body]
        told.append(scope.get("headers"))
        if scope["type"] == "http":
            self.seen.append(told)

        async def receive_and_keep():
            message = await receive()
            body.extend(message.get("body", b""))
            return message

        await self.app(scope, receive_and_keep, send)

    def routes(self):
        """Methods and ends of paths, in order."""
        return [(method, path.split("/")[-1]) for method, path, *_ in self.seen]

    def bodies(self, route):
        return [bytes(body) for _, path, _, body, _ in self.seen if path.endswith(route)]
