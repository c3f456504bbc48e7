"""Runs notebooks in the py:percent format: `# %%` begins a cell, `# %% [markdown]` a text.

`python docs/percent.py docs/notebooks/first_run.py OUT` runs the cells one after the other and
writes OUT/first_run.md with what each printed, and the figures that it wrote, beside it.
"""

import contextlib
import io
import os
import re
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

CELL = re.compile(r"^# %%(.*)\n", re.M)


@dataclass(frozen=True)
class Cell:
    """A text or a piece of code; what it printed and drew, once it has run."""

    is_text: bool
    source: str
    printed: str = ""
    figures: tuple[str, ...] = ()

    def markdown(self):
        if self.is_text:
            return re.sub(r"^# ?", "", self.source, flags=re.M)
        parts = [f"```python\n{self.source}\n```"]
        if self.printed:
            parts.append(f"```text\n{self.printed.rstrip()}\n```")
        parts += [f"![{name}]({name})" for name in self.figures]
        return "\n\n".join(parts)


def cells_of(text):
    """The cells of a notebook, in order."""
    _, *rest = CELL.split(text)
    pairs = zip(rest[::2], rest[1::2], strict=True)
    return [Cell("[markdown]" in head, source.strip("\n")) for head, source in pairs]


def page_of(cells, name):
    """A page with text, code, and what the code gave."""
    note = f"*This page is the notebook `docs/notebooks/{name}.py`, run from top to bottom.*"
    first, *rest = (cell.markdown() for cell in cells)
    return "\n\n".join([first, note, *rest]) + "\n"


def run(cells, name, out):
    """Runs cells in one namespace and an empty directory; figures go to `out`."""
    namespace = {"__name__": name}
    with tempfile.TemporaryDirectory() as directory, contextlib.chdir(directory):
        for cell in cells:
            if cell.is_text:
                yield cell
                continue
            before, screen = set(Path().glob("*.png")), io.StringIO()
            with contextlib.redirect_stdout(screen):
                exec(compile(cell.source, f"{name}.py", "exec"), namespace)
            drawn = sorted(set(Path().glob("*.png")) - before)
            for path in drawn:
                shutil.copy(path, out / f"{name}-{path.name}")
            figures = tuple(f"{name}-{path.name}" for path in drawn)
            yield Cell(False, cell.source, screen.getvalue(), figures)


def main():
    notebook, out = Path(sys.argv[1]), Path(sys.argv[2]).absolute()
    out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("NO_COLOR", "1")
    ran = list(run(cells_of(notebook.read_text()), notebook.stem, out))
    (out / f"{notebook.stem}.md").write_text(page_of(ran, notebook.stem))


if __name__ == "__main__":
    main()
