"""Draws the pictures of the concept pages as SVG: `python docs/pictures.py` writes docs/figures/.

Text and lines have classes: in a light or dark browser they take its colours (the style in the
file), in the site those of its scheme (docs/assets/site.css). `--check` exits 1 if one is stale.
"""

import sys
from pathlib import Path

FIGURES = Path(__file__).parent / "figures"
BLUE, ORANGE, GREEN = "#4c78a8", "#e07b1f", "#4a9b5b"
STYLE = (
    "<style>.k-t{fill:#1f2328}.k-m{fill:#59636e}.k-l{stroke:#59636e;fill:none}"
    ".k-a{fill:#59636e}.k-b{fill:#f3f5f7;stroke:#b1bac4}"
    "@media(prefers-color-scheme:dark){.k-t{fill:#e6e9ef}.k-m{fill:#aab2bf}"
    ".k-l{stroke:#aab2bf}.k-a{fill:#aab2bf}.k-b{fill:#2a2f3a;stroke:#59636e}}</style>"
)
HEIGHT = 20  # of a row of a table


def text(x, y, words, kind="t", anchor="middle", size=14, weight="normal"):
    return (
        f'<text x="{x}" y="{y}" class="k-{kind}" text-anchor="{anchor}" '
        f'font-size="{size}" font-weight="{weight}">{words}</text>'
    )


def box(x, y, width, height, fill=None, radius=2):
    look = f'fill="{fill}"' if fill else 'class="k-b"'
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="{radius}" {look}/>'


def arrow(x1, y1, x2, y2, dashed=False):
    """A line with a head; which way the head looks follows from the line."""
    dash = ' stroke-dasharray="4 4"' if dashed else ""
    length = ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5
    dx, dy = (x2 - x1) / length, (y2 - y1) / length
    bx, by = x2 - 9 * dx, y2 - 9 * dy
    points = ((x2, y2), (bx - 4 * dy, by + 4 * dx), (bx + 4 * dy, by - 4 * dx))
    corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return (
        f'<line x1="{x1}" y1="{y1}" x2="{bx:.1f}" y2="{by:.1f}" class="k-l" stroke-width="1.5"'
        f'{dash}/><polygon points="{corners}" class="k-a"/>'
    )


def table(x, y, width, rows, fills, numbers=True, numbers_side="left"):
    """Rows of a table; `fills` gives some of them a colour, `rows` are their key numbers."""
    parts = []
    for i, key in enumerate(rows):
        top = y + i * HEIGHT
        parts.append(box(x, top, width, HEIGHT - 2, fills.get(key)))
        if numbers:
            at, anchor = (x - 6, "end") if numbers_side == "left" else (x + width + 6, "start")
            parts.append(text(at, top + 14, key, "m", anchor, 12))
    return "".join(parts)


def drawing(width, height, *parts):
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="system-ui, sans-serif">{STYLE}{"".join(parts)}</svg>\n'
    )


def client(x, y, name, keys, fills, note):
    return (
        box(x, y, 170, 92, radius=8)
        + text(x + 14, y + 22, name, anchor="start", weight="600")
        + table(x + 36, y + 34, 70, keys, fills)
        + text(x + 114, y + 48, note, "m", "start", 12)
    )


def select():
    fills = {2: BLUE, 5: GREEN, 7: ORANGE}
    return drawing(
        640,
        250,
        text(95, 24, "server's table", weight="600"),
        text(95, 42, "one row per key", "m", size=12),
        table(50, 56, 90, range(9), fills),
        client(450, 20, "client A", [2, 5], fills, "2 rows"),
        client(450, 138, "client B", [5, 7], fills, "2 rows"),
        arrow(445, 54, 160, 90, dashed=True),
        text(305, 58, "keys 2, 5", "m", size=13),
        arrow(160, 122, 445, 84),
        text(330, 122, "slices of 2, 5", size=13),
        arrow(445, 178, 160, 168, dashed=True),
        text(305, 162, "keys 5, 7", "m", size=13),
        arrow(160, 206, 445, 212),
        text(305, 229, "slices of 5, 7", size=13),
    )


def cut():
    """Two key spaces: words own rows of a table; neurons own a column, a number and a row."""

    def matrix(x, y, width, height, name, shape, *stripes):
        return (
            text(x + width / 2, y - 24, name, weight="600", size=13)
            + text(x + width / 2, y - 8, shape, "m", size=12)
            + box(x, y, width, height)
            + "".join(stripes)
        )

    return drawing(
        640,
        250,
        matrix(40, 70, 90, 130, "embed", "words x 32", box(40, 118, 90, 12, BLUE)),
        text(85, 222, "word 7: row 7", size=13),
        matrix(210, 70, 110, 90, "w1", "32 x neurons", box(262, 70, 12, 90, ORANGE)),
        matrix(355, 104, 110, 12, "b1", "neurons", box(407, 104, 12, 12, ORANGE)),
        matrix(500, 70, 70, 110, "w2", "neurons x 10", box(500, 119, 70, 12, ORANGE)),
        text(390, 222, "neuron 3: a column, a number and a row", size=13),
        matrix(598, 119, 26, 12, "b2", "10"),
        text(611, 150, "to all", "m", size=12),
    )


def delivery():
    """Four ways to the same slices, and who sees what on the way."""
    lanes = (
        ("broadcast", ("server",), "whole model", "nobody learns a key"),
        ("on demand", ("server",), "keys, slices", "the server learns the keys, and whose"),
        ("relay", ("relay", "gateway"), "sealed keys, slices", "relay: who. gateway: which keys"),
        (
            "pir",
            ("server 0", "server 1"),
            "two queries",
            "neither learns a key, unless they collude",
        ),
    )
    parts = []
    for i, (name, parties, moved, seen) in enumerate(lanes):
        y = 18 + i * 66
        parts += [
            text(14, y + 27, name, anchor="start", weight="600"),
            box(118, y, 64, 44, radius=8),
            text(150, y + 27, "client", size=13),
        ]
        if name == "pir":
            parts += [arrow(186, y + 16, 292, y + 8), arrow(186, y + 28, 292, y + 36)]
            parts += [box(296, y - 6, 72, 26, radius=8), text(332, y + 12, parties[0], size=12)]
            parts += [box(296, y + 24, 72, 26, radius=8), text(332, y + 42, parties[1], size=12)]
        elif name == "relay":
            parts += [arrow(186, y + 22, 208, y + 22), box(212, y, 60, 44, radius=8)]
            parts += [text(242, y + 27, parties[0], size=12), arrow(274, y + 22, 296, y + 22)]
            parts += [box(300, y, 68, 44, radius=8), text(334, y + 27, parties[1], size=12)]
        else:
            if name == "on demand":
                parts.append(arrow(186, y + 14, 292, y + 14, dashed=True))
            parts += [arrow(292, y + 28, 186, y + 28), box(296, y, 72, 44, radius=8)]
            parts += [text(332, y + 27, parties[0], size=13)]
        parts.append(text(388, y + 19, moved, "m", "start", 12))
        parts.append(text(388, y + 36, seen, anchor="start", size=12))
    return drawing(640, 282, *parts)


def total():
    """Deselect: updates are added up under their keys; a key that nobody chose stays."""
    left, right = {2: BLUE, 5: BLUE}, {5: ORANGE, 7: ORANGE}

    def sent(y, name, keys, fills):
        return (
            box(16, y, 150, 92, radius=8)
            + text(30, y + 22, name, anchor="start", weight="600")
            + table(56, y + 34, 90, keys, fills)
        )

    rows = {2: BLUE, 5: GREEN, 7: ORANGE}
    notes = {2: "A's row", 5: "A's row + B's row", 7: "B's row", 3: "zero: nobody chose key 3"}
    return drawing(
        640,
        250,
        sent(20, "update of A", [2, 5], left),
        sent(138, "update of B", [5, 7], right),
        arrow(170, 64, 322, 104),
        arrow(170, 84, 322, 160),
        arrow(170, 182, 322, 170),
        arrow(170, 202, 322, 204),
        text(385, 24, "sum", weight="600"),
        text(385, 42, "one row per key", "m", size=12),
        table(350, 56, 90, range(9), rows),
        *(text(456, 70 + key * HEIGHT, words, "m", "start", 13) for key, words in notes.items()),
    )


def rounds():
    """A round as a circle: keys, slices, training, updates, sum."""
    fills = {1: BLUE, 3: ORANGE, 4: GREEN}
    return drawing(
        640,
        230,
        text(80, 22, "server", weight="600"),
        table(36, 36, 90, range(8), fills),
        text(81, 216, "... 200,000 rows", "m", size=12),
        arrow(250, 66, 142, 66, dashed=True),
        text(196, 56, "1. keys", size=13),
        arrow(142, 106, 250, 106),
        text(196, 97, "2. slices", size=13),
        arrow(392, 106, 438, 106),
        box(256, 40, 132, 106, radius=8),
        text(322, 62, "client", weight="600"),
        table(292, 76, 70, [1, 3, 4], fills),
        box(442, 40, 182, 106, radius=8),
        text(533, 62, "3. trains on its data", size=13),
        table(500, 76, 70, [1, 3, 4], fills),
        text(533, 166, "update = start - end", "m", size=12),
        '<path d="M 533 176 V 196 H 158" class="k-l" stroke-width="1.5"/>',
        arrow(158, 196, 138, 196),
        text(346, 188, "4. update, added up under the same keys", size=13),
    )


PICTURES = {"select": select, "cut": cut, "delivery": delivery, "sum": total, "round": rounds}


def main():
    made = {FIGURES / f"{name}.svg": draw() for name, draw in PICTURES.items()}
    if sys.argv[1:] == ["--check"]:
        stale = [path.name for path, drawn in made.items() if path.read_text() != drawn]
        sys.exit(f"not current: {', '.join(stale)}; run make docs" if stale else 0)
    for path, drawn in made.items():
        path.write_text(drawn)
        print(f"wrote docs/figures/{path.name}")


if __name__ == "__main__":
    main()
