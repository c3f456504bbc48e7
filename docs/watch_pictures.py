"""Takes the pictures of the page of `keyhole watch`: `python docs/watch_pictures.py` trains three
small runs (a minute of CPU time), opens the page in a headless browser, and writes
docs/figures/watch-light.png, watch-dark.png and watch-phone.png. It says so where there is no
browser: apt install chromium chromium-driver. Given a folder, it keeps the runs there,
and finds them the next time.
"""

import io
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent / "tools"))

from browser import browser, missing  # noqa: E402
from keyhole.experiments.watch.app import WatchApp  # noqa: E402
from keyhole.experiments.watch.folder import RunFolder  # noqa: E402
from keyhole.service.transport import serving  # noqa: E402

COMMAND = [sys.executable, "-c", "from keyhole.cli.main import main; main()", "train", "so_tag"]
SHARED = "--rounds 30 --evaluate-every 2 --cohort 20 --size words=2000 --out"
ARMS = (
    "--m 50 --trials 3",
    "--m 400 --trials 3",
    "--m 400 --delivery pir --aggregation secure-sparse --over-selection 1.3",
)
LOOKS = {"light": (1180, False), "dark": (1180, True), "phone": (390, False)}


def main():
    if lacking := missing():
        sys.exit(f"no pictures: not installed: {lacking}")
    with tempfile.TemporaryDirectory() as home:
        runs = Path(*sys.argv[1:2] or (home, "keyhole-runs"))
        for arm in ARMS:
            subprocess.run([*COMMAND, *f"{arm} {SHARED}".split(), str(runs)], check=True)
        folder = RunFolder(runs)
        names = "&".join(run["name"] for run in folder.overview()["runs"])
        with serving(WatchApp(folder, folder), prepare=lambda: None) as url, browser() as window:
            window.open(f"{url}/#{names}")
            window.wait("return document.querySelectorAll('section[id^=cohorts-]').length === 3")
            window.run("document.getElementById('clock').style.display = 'none'")
            for name, (width, dark) in LOOKS.items():
                window.look(width, 900, dark=dark, whole=True)
                path = DOCS / "figures" / f"watch-{name}.png"
                picture = Image.open(io.BytesIO(window.picture())).convert("RGB")
                picture.quantize(256, Image.Quantize.MAXCOVERAGE).save(path, optimize=True)
                print(path.relative_to(DOCS.parent))


if __name__ == "__main__":
    main()
