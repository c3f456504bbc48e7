"""Hooks of the docs site: examples in docstrings as code, pictures that follow light and dark, and
notebooks as pages. With RUN_NOTEBOOKS=1 the notebooks are run, and pages show what they print."""

import os
import re
import subprocess
import sys
from pathlib import Path

import griffe
from mkdocs.structure.files import File

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS))
from percent import cells_of, page_of  # noqa: E402  (a hook is no package)

DOCTEST = re.compile(r"^( *)>>> .*(?:\n(?!\s*$).*)*", re.M)
FENCE = re.compile(r"^```python \w+$", re.M)  # the word says which packages its test needs
PICTURE = re.compile(r"!\[([^\]]*)\]\(([^)]*\.svg)\)")


class Doctests(griffe.Extension):
    """Fences the `>>>` paragraphs of docstrings: Markdown would read them as quotes."""

    def on_instance(self, *, obj, **_):
        if obj.docstring:
            obj.docstring.value = DOCTEST.sub(_fenced, obj.docstring.value)


def _fenced(found):
    return f"{found[1]}```pycon\n{found[0]}\n{found[1]}```"


def on_page_markdown(markdown, page, **_):
    """Puts drawings of docs/pictures.py into the page itself, where the site's colours reach them,
    and leaves out of fences what concerns tests alone."""
    folder, markdown = (DOCS / page.file.src_uri).parent, FENCE.sub("```python", markdown)
    return PICTURE.sub(lambda found: _drawing(found, folder / found[2]), markdown)


def _drawing(found, path):
    """A drawing as it is; a chart, whose colours are fixed, stays a link to its file."""
    drawing, alt = path.read_text().strip().replace("\n", ""), found[1]
    if ".k-t{" not in drawing:
        return found[0]
    return f'<figure class="drawing" role="img" aria-label="{alt}">{drawing}</figure>'


def on_files(files, config, **_):
    """Adds a page for each notebook."""
    for notebook in sorted((DOCS / "notebooks").glob("*.py")):
        for name, content in _pages(notebook, Path(config.site_dir).parent / "notebooks"):
            files.append(File.generated(config, f"notebooks/{name}", content=content))
    return files


def _pages(notebook, out):
    """File name -> content: the page of a notebook, and its figures where it has been run."""
    if os.environ.get("RUN_NOTEBOOKS") != "1":
        return [(f"{notebook.stem}.md", page_of(cells_of(notebook.read_text()), notebook.stem))]
    subprocess.run([sys.executable, DOCS / "percent.py", notebook, out], check=True)
    return [(path.name, path.read_bytes()) for path in sorted(out.glob(f"{notebook.stem}[.-]*"))]
