"""Hooks of the docs site: examples in docstrings as code, pictures that follow light and dark."""

import re
from pathlib import Path

import griffe

DOCS = Path(__file__).parent
DOCTEST = re.compile(r"^( *)>>> .*(?:\n(?!\s*$).*)*", re.M)
PICTURE = re.compile(r"!\[([^\]]*)\]\(([^)]*\.svg)\)")


class Doctests(griffe.Extension):
    """Fences the `>>>` paragraphs of docstrings: Markdown would read them as quotes."""

    def on_instance(self, *, obj, **_):
        if obj.docstring:
            obj.docstring.value = DOCTEST.sub(_fenced, obj.docstring.value)


def _fenced(found):
    return f"{found[1]}```pycon\n{found[0]}\n{found[1]}```"


def on_page_markdown(markdown, page, **_):
    """Puts drawings into the page itself, where the site's colours reach them."""
    folder = (DOCS / page.file.src_uri).parent
    return PICTURE.sub(lambda found: _drawing(found[1], folder / found[2]), markdown)


def _drawing(alt, path):
    drawing = path.read_text().strip().replace("\n", "")
    return f'<figure class="drawing" role="img" aria-label="{alt}">{drawing}</figure>'
