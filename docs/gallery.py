"""Runs the examples and writes docs/gallery.md: what each is, its command, its output, its figure.

python docs/gallery.py                     run all of them
python docs/gallery.py scaffold fedrolex   run these anew, and keep the others as they are
"""

import ast
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

DOCS = Path(__file__).parent
ROOT = DOCS.parent
PAGE = DOCS / "gallery.md"
HEAD = """\
# Gallery

<!-- Written by `python docs/gallery.py` from what the examples print; do not edit. -->

The programs in `examples`, each with its command and what it printed. Sizes are small, so that most
take seconds. Times and bytes of processes differ from machine to machine.

"""
ORDER = ("hello_select", "recommender", "fedrolex", "scaffold", "personal_head", "llm_lora_experts")
MAX_LINES = 40  # of an output


def names():
    """Examples in the order of the page: what people train first, then the rest by name."""
    found = {path.stem for path in (ROOT / "examples").glob("*.py")}
    return [*(name for name in ORDER if name in found), *sorted(found - set(ORDER))]


def section(name):
    """Runs an example; returns its section of the page, and keeps its figure."""
    path = ROOT / "examples" / f"{name}.py"
    source = path.read_text()
    title, *paragraphs = (ast.get_docstring(ast.parse(source)) or name).split("\n\n")
    about = " ".join(p for p in paragraphs if not re.match(r"\s*(python |Run it|Reference)", p))
    arguments = ["--small"] if '"--small" in sys.argv' in source else []
    with tempfile.TemporaryDirectory() as directory:
        done = subprocess.run(
            [sys.executable, path, *arguments],
            cwd=directory,
            env={**os.environ, "COLUMNS": "100", "NO_COLOR": "1"},
            stdout=subprocess.PIPE,
            text=True,
            timeout=900,
            check=True,
        )
        figures = [keep(name, drawn) for drawn in sorted(Path(directory).glob("*.png"))]
    lines = done.stdout.rstrip().splitlines()
    shown = lines[:MAX_LINES] + (["..."] if len(lines) > MAX_LINES else [])
    command = " ".join(["python", f"examples/{name}.py", *arguments])
    parts = [f"## {name}", one_line(title), one_line(about)]
    parts.append("```text\n$ " + "\n".join([command, *shown]) + "\n```")
    parts += [f"![What {name} draws](figures/{figure})" for figure in figures]
    return "\n\n".join(part for part in parts if part)


def keep(name, drawn):
    """Keeps a figure beside those of the docs; returns its name."""
    kept = DOCS / "figures" / f"gallery-{name}.png"
    kept.write_bytes(drawn.read_bytes())
    return kept.name


def one_line(text):
    return " ".join(text.split())


def main():
    text = PAGE.read_text() if PAGE.exists() else ""
    kept = {part.split("\n", 1)[0][3:]: part for part in re.split(r"(?m)^(?=## )", text)[1:]}
    asked = sys.argv[1:] or names()
    for name in asked:
        kept[name] = section(name)
        sections = "\n\n".join(kept[each].rstrip() for each in names() if each in kept)
        PAGE.write_text(f"{HEAD}{sections}\n")
        print(f"wrote the section of {name}")


if __name__ == "__main__":
    main()
