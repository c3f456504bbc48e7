"""Makes a project whose devices are tabs of a browser, and serves the page that they open.

    python examples/tabs/run.py FOLDER

FOLDER gets keyhole.toml, made-up posts on twelve hobbies that the trainer measures the model on,
kits with tokens for two tabs, and page/: the files of clients/web with the words and tags of those
posts. In a FOLDER that is there, page/ is written again, and kits/ if it is gone.
"""

import json
import lzma
import shutil
import sys
from contextlib import suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np

from keyhole.data.open import open_dataset
from keyhole.project.kits import provision
from keyhole.project.parties import PINNED
from keyhole.project.spec import FILE, Project

CLIENT = Path(__file__).parents[2] / "clients" / "web"
DATA, KITS, PAGE = "posts.jsonl.xz", "kits", "page"
SERVICE_PORT, PAGE_PORT = 8100, 8300
DEVICES = ["tab-0", "tab-1"]
SEED = 0
USERS, POSTS_OF_USER, HOBBIES_OF_USER = 120, 12, 3
EXAMPLES, POSTS_OF_EXAMPLE, HOBBIES_OF_EXAMPLE = 6, 24, 6

HOBBIES = {
    "bread": "starter sourdough dough flour yeast crumb crust oven knead proof loaf rye salt",
    "cycling": "bike wheel spoke tyre brake chain saddle pedal gear cassette frame hub",
    "garden": "soil seed tomato compost bed weed slug mulch prune rose greenhouse bulb hedge",
    "chess": "opening pawn bishop knight rook endgame check mate gambit castling queen board",
    "guitar": "string fret chord capo strum pick tuning amplifier pedalboard scale riff solo",
    "hiking": "trail boots backpack tent map summit ridge blister compass shelter stove valley",
    "photo": "lens aperture shutter tripod exposure film sensor focus flash portrait negative",
    "sailing": "sail mast keel tiller rope anchor harbour tack jib wind boom hull mooring",
    "knitting": "yarn needle stitch purl wool pattern sleeve cable gauge sock skein row cuff",
    "coffee": "espresso grinder bean roast filter crema milk kettle brew portafilter dose",
    "astronomy": "telescope star planet nebula eyepiece galaxy comet mount orbit moon eclipse",
    "aquarium": "tank fish pump plant algae shrimp heater gravel nitrate snail tetra bubble",
}
COMMON = ["the", "my", "a", "of", "and", "to", "with", "for"]
TOPICS = 5  # words of a hobby that are tags as well

PROJECT = """# Tabs of a browser train this: page/page.json has the words and the tags by number.
task = "so_tag"
data = "{data}" # that the trainer measures the model on
rounds = 30
evaluate_every = 5

[sizes]
words = {words}
tags = {tags}

[cohort]
size = {devices}
seconds = 60 # a round closes after this long with what has arrived

[client]
lr = 1.0
batch_size = 8

[keys.word]
choice = "top"
count = 32 # max words of a tab

[deploy]
service = "http://127.0.0.1:{service}"
devices = 0 # that are no tabs
pages = ["http://127.0.0.1:{page}"]
"""


def post(rng, hobby):
    """Tags and a text: words of the hobby, the first ones more often, among those of everybody."""
    own = HOBBIES[hobby].split()
    said = [own[int(len(own) * u * u)] for u in rng.random(rng.integers(4, 8))]
    text = rng.permutation(said + rng.choice(COMMON, rng.integers(4, 8)).tolist())
    return [hobby, *(word for word in own[:TOPICS] if word in said)], " ".join(text)


def posts(rng, count, hobbies):
    """Posts of one person, who has some of the hobbies."""
    own = rng.choice(list(HOBBIES), hobbies, replace=False).tolist()
    return [post(rng, own[i % hobbies]) for i in range(count)]


def write_project(folder: Path):
    """Writes keyhole.toml and the trainer's posts."""
    rng = np.random.default_rng(SEED)
    folder.mkdir(parents=True)
    with lzma.open(folder / DATA, "wt") as file:
        for user in range(USERS):
            for tags, text in posts(rng, POSTS_OF_USER, HOBBIES_OF_USER):
                told = {"user": user, "tags": tags, "title": "", "text": text}
                print(json.dumps(told), file=file)
    sizes = {name: len(found) for name, found in names_in(folder).items()}
    told = {"data": DATA, "devices": len(DEVICES), "service": SERVICE_PORT, "page": PAGE_PORT}
    (folder / FILE).write_text(PROJECT.format(**told, **sizes))


def names_in(folder):
    """Words and tags of the trainer's posts, by their numbers."""
    names = open_dataset(folder / DATA).names
    return {what: list(names[what]) for what in ("words", "tags")}


def make_kits(folder):
    """Makes the kits of services, trainer and two tabs where there are none; returns the tokens."""
    provision(Project.open(folder), folder / KITS, DEVICES)
    return [token for name in DEVICES for token in sorted((folder / KITS / name).glob("*.token"))]


def page_of(folder):
    """What the page must know of a project: which word has which number, and what to fill in."""
    deploy = Project.open(folder).deploy
    rng = np.random.default_rng([SEED, 1])
    made = [posts(rng, POSTS_OF_EXAMPLE, HOBBIES_OF_EXAMPLE) for _ in range(EXAMPLES)]
    lines = [[f"{text} #{' #'.join(tags)}" for tags, text in each] for each in made]
    return {
        **names_in(folder),
        "examples": ["\n".join(each) for each in lines],
        "service": deploy.service,
        "second": deploy.second,
        "trainer_key": (folder / KITS / DEVICES[0] / PINNED).read_text().strip(),
    }


def write_page(where, told):
    """Writes the files of a page, and page.json with what it is told."""
    shutil.copytree(CLIENT, where, ignore=shutil.ignore_patterns("*.md"), dirs_exist_ok=True)
    (where / "page.json").write_text(json.dumps(told))


class Files(SimpleHTTPRequestHandler):
    """Serves files, and prints no line for each."""

    def log_message(self, format, *args):
        pass


def page_server(where, port):
    """A server of a page on this machine alone."""
    return ThreadingHTTPServer(("127.0.0.1", port), partial(Files, directory=where))


def main(folder):
    """Makes the project where it is not there, and serves its page until Ctrl-C."""
    if folder.exists() and not (folder / DATA).exists():
        sys.exit(f"{folder} is in use: expected a new folder, or one that this script has made")
    try:
        server = page_server(folder / PAGE, PAGE_PORT)
    except OSError as error:
        sys.exit(f"the page cannot be served at port {PAGE_PORT}: {error.strerror}")
    with server, suppress(KeyboardInterrupt):
        if not folder.exists():
            write_project(folder)
        tokens = make_kits(folder)
        write_page(folder / PAGE, page_of(folder))
        print(f"In two other terminals:\n\n    cd {folder} && keyhole up")
        print(f"    cd {folder} && keyhole run --deploy\n")
        for token in tokens:
            print(f"Token of {token.parent.name} for the {token.stem}:\n    {token.read_text()}")
        print(f"Open http://127.0.0.1:{PAGE_PORT} in a tab for each token; Ctrl-C ends the page.")
        server.serve_forever()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/tabs/run.py FOLDER")
    main(Path(sys.argv[1]))
