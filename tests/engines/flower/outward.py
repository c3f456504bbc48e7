"""Notes which Python processes connect to, or ask for the name of, a machine other than this one.

Every process that has `variables(directory)` in its environment loads a hook when it starts, before
any code of Flower or ours. What libraries in C do with sockets of their own is not seen.
"""

import os

_HOOK = """
import sys
HERE, NOTES = {"127.0.0.1", "::1", "localhost", "0.0.0.0", "", None}, %r

def note(name, text):
    with open(f"{NOTES}/{name}", "a") as file:
        file.write(text + "\\n")

def look(event, args):
    if event == "socket.connect" and isinstance(args[1], tuple):
        host = args[1][0]
    elif event in ("socket.getaddrinfo", "socket.gethostbyname", "socket.sendto"):
        host = args[0] if event != "socket.sendto" else args[1][0]
    else:
        return
    host = host.decode() if isinstance(host, bytes) else host
    if host not in HERE:
        note("outward", f"{event} {host}")

sys.addaudithook(look)
note("started", " ".join(sys.orig_argv))
"""


def variables(directory):
    """Environment variables; what is noted goes to `started` and `outward` in the directory."""
    directory.mkdir(exist_ok=True)
    (directory / "sitecustomize.py").write_text(_HOOK % str(directory))
    paths = [str(directory), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths)}


def outward(directory):
    """What was noted."""
    path = directory / "outward"
    return path.read_text().splitlines() if path.exists() else []


def started(directory, *names):
    """Those of the commands that have run with the hook."""
    text = (directory / "started").read_text()
    return [name for name in names if name in text]
