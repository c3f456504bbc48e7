"""Reads Stack Exchange data dumps: Posts.xml and Comments.xml of a site, as plain text.

A dump has one `<row .../>` on each line; the text of a post is HTML in an attribute. Block code,
links, e-mail addresses and @mentions are left out, and so are posts without a user and texts of
fewer than three words.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import TypedDict

from keyhole.data.readers.source import bad_file, reading

_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')
_TAG = re.compile(r"[^<>|]+")  # <python><list>, in later dumps |python|list|
_UNWANTED = re.compile(r"https?://\S+|www\.\S+|\S+@\S+\.\w+|(?<!\w)@\w+")
_BLOCKS = ("blockquote", "br", "div", "h1", "h2", "h3", "hr", "li", "ol", "p", "pre", "td", "ul")
_MIN_WORDS = 3
_KINDS = {"1": "question", "2": "answer"}


class DumpedText(TypedDict):
    """One text of a user."""

    site: str
    site_user: int
    kind: str
    post: int
    date: str
    score: int
    tags: list[str]
    title: str
    text: str


class _Text(HTMLParser):
    """Collects the text of HTML without block code."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self._in_code = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Begins a line with each block."""
        self._in_code += tag == "pre"
        self.parts += ["\n"] if tag in _BLOCKS else []

    def handle_endtag(self, tag: str) -> None:
        """Ends a line with each block."""
        self._in_code -= tag == "pre" and self._in_code > 0
        self.parts += ["\n"] if tag in _BLOCKS else []

    def handle_data(self, data: str) -> None:
        """Keeps text outside of code."""
        self.parts += [] if self._in_code else [data]


def plain_text(html: str, characters: int) -> str:
    """Returns the text of a post, cut at a number of characters.

    >>> plain_text("<p>Ask @ann, see <a href='x'>this</a></p><pre>x = 1</pre><p>a &lt; b</p>", 99)
    'Ask , see this\\na < b'
    """
    parser = _Text()
    parser.feed(html)
    parser.close()
    lines = _UNWANTED.sub("", "".join(parser.parts)).split("\n")
    kept = (" ".join(line.split()) for line in lines)
    return "\n".join(line for line in kept if line)[:characters].rstrip()


def read_site(folder: Path, characters: int, *, with_comments: bool) -> Iterator[DumpedText]:
    """Yields the texts of one site: questions, answers, and comments if they are wanted.

    Args:
        folder: an unpacked dump; its name is the site's.
        characters: that a text is cut at.
    """
    posts = folder / "Posts.xml"
    if not posts.is_file():
        fix = "unpack the .7z file of the site, and name the folder"
        raise bad_file(folder, "no Posts.xml", "the folder of a Stack Exchange dump", fix=fix)
    site = folder.resolve().name.removesuffix(".com").removesuffix(".stackexchange")
    with reading(folder, "rows of a Stack Exchange dump"):
        yield from _posts(folder, site, characters, with_comments)


def _posts(folder: Path, site: str, characters: int, with_comments: bool) -> Iterator[DumpedText]:
    posts, comments = folder / "Posts.xml", folder / "Comments.xml"
    tags = {
        row["Id"]: _TAG.findall(row.get("Tags", ""))
        for row in _rows(posts)
        if row.get("PostTypeId") == "1"
    }
    of_post: dict[str, list[str]] = {}
    for row in _rows(posts):
        question = row["Id"] if row.get("PostTypeId") == "1" else row.get("ParentId", "")
        of_post[row["Id"]] = tags.get(question, [])
        if (kind := _KINDS.get(row.get("PostTypeId", ""))) is not None:
            text = plain_text(row.get("Body", ""), characters)
            title = row.get("Title", "") if kind == "question" else ""
            yield from _record(site, kind, row, "OwnerUserId", row["Id"], of_post, title, text)
    if with_comments and comments.is_file():
        for row in _rows(comments):
            text = plain_text(row.get("Text", "").replace("<", "&lt;"), characters)
            yield from _record(site, "comment", row, "UserId", row["PostId"], of_post, "", text)


def _record(
    site: str,
    kind: str,
    row: dict[str, str],
    user: str,
    post: str,
    tags: dict[str, list[str]],
    title: str,
    text: str,
) -> Iterator[DumpedText]:
    """One record, or none for a text without a user or of too few words."""
    if int(row.get(user, -1)) > 0 and len(text.split()) >= _MIN_WORDS:
        yield DumpedText(
            site=site,
            site_user=int(row[user]),
            kind=kind,
            post=int(post),
            date=row["CreationDate"][:10],
            score=int(row.get("Score", 0)),
            tags=tags.get(post, []),
            title=title,
            text=text,
        )


def _rows(path: Path) -> Iterator[dict[str, str]]:
    """Yields the attributes of each row of a file."""
    with reading(path, "a whole XML file of a Stack Exchange dump"), path.open("rb") as lines:
        last = b""
        for line in lines:
            if line.lstrip().startswith(b"<row "):
                found = _ATTRIBUTE.findall(line.decode())
                yield {name: unescape(value) for name, value in found}
            last = line if line.strip() else last
        if not last.lstrip().startswith(b"</"):
            raise ValueError("no end: it is cut short")
