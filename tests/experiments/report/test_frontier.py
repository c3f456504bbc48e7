"""The demo's picture: the saving is in it, and nothing hides anything."""

import pytest

from keyhole.experiments.report.frontier import draw_demo


def demo_figure(ends):
    """The demo's picture of curves that rise to these ends."""
    points = {label: (3200 / 4**i, end) for i, (label, end) in enumerate(ends.items())}
    curves = {label: {t: end * t / 9 for t in range(1, 10)} for label, end in ends.items()}
    figure = draw_demo(curves, points, "recall_at_5")
    figure.draw_without_rendering()
    return figure


def test_lines_that_coincide_are_both_seen():
    left, _ = demo_figure({"no select": 0.9, "own": 0.9, "top": 0.5}).axes
    under, over, _ = left.lines
    assert (under.get_ydata() == over.get_ydata()).all()
    assert under.get_linewidth() > 3 * over.get_linewidth()
    assert under.get_zorder() <= over.get_zorder()
    assert under.get_alpha() < 0.5
    assert under.get_marker() != over.get_marker()


@pytest.mark.parametrize("lowest", [0.899, 0.5])
def test_every_line_and_point_has_its_own_label_and_none_overlap(lowest):
    figure = demo_figure({"no select": 0.9, "own": 0.9, "top": lowest})
    for axes, said in zip(figure.axes, ("own", "own\n800 KB, 75% less"), strict=True):
        assert said in [text.get_text() for text in axes.texts]
        boxes = [text.get_window_extent() for text in axes.texts]
        assert len(boxes) == 3
        assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


def test_the_picture_shows_recall_against_what_a_client_moves():
    _, right = demo_figure({"no select": 0.9, "own": 0.9, "top": 0.5}).axes
    assert "KB per client" in right.get_xlabel()
    assert "recall@5" in right.get_ylabel()
    points = [tuple(line.get_xydata()[0]) for line in right.lines[1:]]
    assert points == [(3200.0, 0.9), (800.0, 0.9), (200.0, 0.5)]
