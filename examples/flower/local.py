"""Trains a task with a whole Flower deployment on this machine, for a first look.

    python examples/flower/local.py so_tag --m 100 --rounds 3

It starts what a deployment has, by the commands that a deployment is started with: the slice
service, a SuperLink and SuperNodes. `keyhole flower app` writes the app, and `flwr run` runs it.
Options that are not known here are those of `keyhole flower app`. The run, logs and Flower's own
files are in OUT. All ends with the run or with Ctrl-C, and the same command goes on with a run that
was stopped.
"""

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

PATIENCE = 60.0  # seconds for a service to start; a sixth of them to end
CONNECTION = '[superlink]\ndefault = "local"\n[superlink.local]\naddress = "{}"\ninsecure = true\n'


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("task", help="what to train, as `keyhole train` takes it")
    parser.add_argument("--nodes", type=int, default=2, help="SuperNodes; default 2")
    parser.add_argument(
        "--rehearse", action="store_true", help="train the bytes of keyhole train, all by seed 0"
    )
    parser.add_argument("--out", type=Path, default=Path("keyhole-flower"), help="all files")
    known, options = parser.parse_known_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    out = known.out.absolute()
    env = environment(out / "home")
    for folder in (out / "home", out / "logs", out / "rounds"):
        folder.mkdir(parents=True, exist_ok=True)
    keys, app, run = out / "keys", out / "app", out / "run"
    if not keys.exists():
        subprocess.run(["keyhole", "token", "new-key", keys], env=env, check=True)
    service, link = free_port(), free_port()
    (out / "home" / "config.toml").write_text(CONNECTION.format(f"127.0.0.1:{link}"))
    serve = ["keyhole", "serve", out / "rounds", "--token-key", keys, "--port", service]
    superlink = ["flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", link]
    supernode = ["flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{link}"]
    shutil.rmtree(app, ignore_errors=True)
    write = ["keyhole", "flower", "app", app, "--task", known.task, "--run", run, *options]
    write += ["--service", f"http://127.0.0.1:{service}", "--rounds-directory", out / "rounds"]
    write += ["--token-key", keys, "--min-nodes", known.nodes]
    if known.rehearse:  # a real run draws cohorts, and nodes their numbers, from secrets
        write += ["--named-cohorts"]
        supernode += ["--node-config", "seed=0"]
    subprocess.run(list(map(str, write)), env=env, check=True, stdout=subprocess.DEVNULL)
    with ExitStack() as stack:
        start = [*superlink, "--disable-runtime-dependency-installation"]
        for name, command, port in (("service", serve, service), ("superlink", start, link)):
            process = stack.enter_context(running(command, out / "logs" / name, env))
            wait_for(process, port)
        for number in range(known.nodes):
            node = [*supernode, "--host", "127.0.0.1", "--port", free_port()]
            stack.enter_context(running(node, out / "logs" / f"supernode-{number}", env))
        subprocess.run(["flwr", "run", app, "local", "--stream"], env=env, check=True)
    if not (run / "result.json").exists():
        sys.exit(f"the run ended before it was done: see {out / 'logs'}; the same command goes on")
    print(f"run: {run}")


def environment(home):
    """Keeps Flower from sending usage statistics and from asking for newer versions, and its files
    in a folder of ours."""
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    beside = str(Path(sys.executable).parent)
    path = os.pathsep.join([beside, os.environ.get("PATH", os.defpath)])
    return {**os.environ, **quiet, "FLWR_HOME": str(home), "PATH": path}


@contextmanager
def running(command, log, env):
    """A process that ends with the block, with what it has started in its session."""
    with log.open("ab") as file:
        process = subprocess.Popen(
            list(map(str, command)), env=env, stdout=file, stderr=file, start_new_session=True
        )
    try:
        yield process
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(PATIENCE / 6)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_for(process, port):
    """Returns when the port of a process takes connections."""
    until = time.monotonic() + PATIENCE
    while process.poll() is None and time.monotonic() < until:
        with socket.socket() as one:
            if one.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    sys.exit(f"{process.args[0]} did not start: see its log")


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


if __name__ == "__main__":
    main()
