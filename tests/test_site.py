"""The docs site is built offline, strictly, and its pages fetch nothing from other hosts."""

import os
import re
import subprocess
import sys

import pytest

from tests.helpers import ROOT

# What a browser fetches by itself: a link in the text is followed by nobody but the reader.
FETCHED = re.compile(
    r"<(?:link|script|img|iframe|source|video)\b[^>]*?(?:src|href)=\"?((?:https?:)?//[^\"\s>]+)"
    r"|url\(\"?((?:https?:)?//[^)\"]+)|@import \"?((?:https?:)?//[^\"]+)"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    place = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", place]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return place


@pytest.mark.slow
def test_no_page_fetches_from_another_host(site):
    pages = [*site.rglob("*.html"), *site.rglob("*.css")]
    assert len(pages) > 60
    for page in pages:
        found = [address for match in FETCHED.findall(page.read_text()) for address in match]
        assert not any(found), f"{page.name}: {found}"


@pytest.mark.slow
def test_the_reference_shows_docstrings_and_their_examples(site):
    page = (site / "reference" / "primitives.html").read_text()
    assert 'id="keyhole.KeySpace"' in page
    assert page.count('class="gp"') > 20  # prompts, highlighted
    for name in ("data", "keys", "errors"):
        assert (site / "reference" / f"{name}.html").read_text().count("doc-heading") > 10
