"""Draws the pictures of the documentation into docs/pictures.

python docs/draw/pictures.py            writes them
python docs/draw/pictures.py --check    says whether they are up to date
"""

import itertools
import sys
from pathlib import Path

from svg import GREY, INK, KEPT, LINK, PALE, PANEL, Picture

FOLDER = Path(__file__).parents[1] / "pictures"

# Channels that every host keeps, of eight.
MASK = (True, False, True, True, False, False, True, False)


def _channels(
    picture: Picture, x: float, y: float, colors: list[str], width: float, height: float
) -> None:
    for number, color in enumerate(colors):
        stroke = GREY if color == "#ffffff" else "none"
        step = width * 1.25
        picture.box(x + number * step, y, width, height, color, stroke, radius=1)


def idea() -> Picture:
    """Hosts x devices: sum inside, choose and gather, sum across, put back."""
    picture = Picture(460, 416, "What crosses the link between hosts")
    full = [KEPT if kept else PALE for kept in MASK]
    back = [KEPT if kept else "#ffffff" for kept in MASK]
    for name, left in (("host 1", 4), ("host 2", 300)):
        middle = left + 78
        picture.box(left, 26, 156, 386, PANEL, GREY, radius=6)
        picture.text(middle, 18, name, 14, bold=True)
        for number, x in ((1, left + 10), (2, left + 86)):
            picture.text(x + 30, 46, f"device {number}", 12.5)
            _channels(picture, x, 54, [KEPT] * 8, 6, 34)
        for x in (left + 40, left + 116):
            picture.line(((x, 94), (x, 104), (middle, 104)))
        picture.arrow((middle, 104), (middle, 128))
        _channels(picture, left + 12, 134, full, 13.5, 46)
        picture.arrow((middle, 188), (middle, 226))
        _channels(picture, left + 45, 232, [KEPT] * 4, 13.5, 46)
        picture.arrow((middle, 286), (middle, 340))
        _channels(picture, left + 12, 346, back, 13.5, 46)
    for y, number, words in (
        (86, "1", "dense sum\ninside a host"),
        (146, "2", "choose channels,\nthe same\non every host"),
        (312, "4", "put the mean\nback in place"),
    ):
        picture.text(230, y, f"{number}  {words}", 13)
    picture.text(230, 222, "3  small dense sum", 13, LINK, bold=True)
    picture.arrow((134, 255), (326, 255), LINK, 3, both=True)
    picture.text(230, 276, "over the slow link", 13, LINK)
    return picture


def timeline() -> Picture:
    """Steps and rounds of two hosts; density, freeze and cut below them."""
    picture = Picture(460, 330, "A run in time")
    left, right, steps = 70, 450, 48
    step = (right - left) / steps

    def at(number: float) -> float:
        return left + number * step

    for y, name in ((34, "host 1"), (70, "host 2")):
        picture.text(left - 10, y + 4, name, 13, anchor="end")
        picture.line(((left, y), (right, y)), GREY, 1)
        for number in range(steps + 1):
            picture.line(((at(number), y - 4), (at(number), y + 4)), GREY, 1)
    for number in range(4, steps + 1, 4):
        picture.line(((at(number), 30), (at(number), 74)), LINK, 3)
    picture.text(left, 16, "each tick: one local step", 12.5, anchor="start")
    picture.text(right, 16, "each bar: a round", 12.5, LINK, anchor="end")

    top, bottom = 112, 212
    freeze, cut = 24, 32
    stairs = ((0, 1.0), (8, 0.83), (16, 0.67), (freeze, 0.5), (steps, 0.5))
    points = [(at(0), top)]
    for (start, value), (end, _) in itertools.pairwise(stairs):
        y = bottom - value * (bottom - top)
        if start == freeze:
            picture.box(at(start), y, at(end) - at(start), bottom - y, KEPT, radius=0)
        else:
            width = at(end) - at(start)
            picture.box(at(start), y, width, bottom - y, "#9dbfe2", radius=0)
        points += [(at(start), y), (at(end), y)]
    picture.line(points, INK, 1.5)
    picture.line(((left, top - 6), (left, bottom), (right, bottom)), INK, 1)
    picture.text(left - 10, top + 5, "1", 13, anchor="end")
    picture.text(left - 10, top + 55, "1/2", 13, anchor="end")
    picture.text(left - 10, bottom + 4, "0", 13, anchor="end")
    picture.text(right, top - 4, "share of\nchannels kept", 13, anchor="end")
    for number, words in ((freeze, "freeze"), (cut, "cut")):
        picture.line(((at(number), 92), (at(number), 226)), INK, 1.5, dash="5 3")
        picture.text(at(number), 240, words, 13.5, bold=True)
    picture.text(at(12), 240, "masks move", 13)
    picture.text(at(41), 240, "masks stay", 13)

    y = 264
    picture.text(left - 10, y + 14, "network", 13, anchor="end")
    picture.box(at(0), y, at(cut) - at(0), 34, PALE, GREY)
    picture.text(at(cut / 2), y + 22, "full shape, removed channels zero", 12.5)
    picture.box(at(cut), y + 8.5, at(steps) - at(cut), 17, KEPT)
    picture.text(at(40), y + 21.5, "small shape", 12.5, "#ffffff")
    picture.text((left + right) / 2, 322, "steps of the run", 13)
    picture.arrow((at(34), 318), (right, 318))
    return picture


def kernel() -> Picture:
    """A kernel cut along its input and its output channels."""
    picture = Picture(460, 268, "A kernel cut along two axes")
    left, top, cell = 96, 62, 20
    inputs = (False, True, True, False, True, False, True, False)
    for row, keeps_row in enumerate(inputs):
        for column, keeps_column in enumerate(MASK):
            both = keeps_row and keeps_column
            either = keeps_row or keeps_column
            color = KEPT if both else ("#c9d9ea" if either else PALE)
            x, y = left + column * cell, top + row * cell
            picture.box(x, y, cell - 2, cell - 2, color, radius=1)
    for number, kept in enumerate(MASK):
        x = left + number * cell + 9
        picture.text(x, top - 6, "●" if kept else "○", 13, KEPT if kept else GREY)
    for number, kept in enumerate(inputs):
        y = top + number * cell + 14
        picture.text(left - 12, y, "●" if kept else "○", 13, KEPT if kept else GREY)
    picture.text(left + 79, 18, "output channels", 13, bold=True)
    picture.text(left + 79, 35, "(their group: half kept)", 12.5)
    picture.text(4, top + 66, "input\nchannels", 13, anchor="start", bold=True)
    picture.text(4, top + 102, "(half\nkept)", 12.5, anchor="start")
    picture.arrow((268, 141), (316, 141), INK, 2)
    picture.text(292, 130, "cut", 13)
    for row in range(4):
        for column in range(4):
            x, y = 332 + column * cell, 101 + row * cell
            picture.box(x, y, cell - 2, cell - 2, KEPT, radius=1)
    picture.text(
        371, 206, "a quarter is left:\nsmall and dense,\nno positions to send", 13
    )
    picture.text(left + 79, 246, "kernel [height, width, in, out]", 12.5)
    return picture


ROOMS = (
    ("base", "settings, files, errors", ""),
    ("mesh", "hosts x devices", "the mesh"),
    ("processes", "launchers, joining, heartbeat", "processes"),
    ("data", "sets, order, loaders", "batches"),
    ("models", "networks, widths explicit", "apply function"),
    ("tasks", "losses, metrics, your own", "loss, sums"),
    ("channels", "traces what can only go together", "channel groups"),
    ("sparsity", "scores, budgets, projections", "masks, counts"),
    ("comm", "collectives, wires, byte counts", "means over hosts"),
    ("methods", "H-SADMM and the others", "updates, rounds"),
    ("shrink", "cuts, certifies, measures", "small network"),
    ("export", "a folder that runs anywhere", "exported folder"),
    ("pruner", "all of that in one call", "small network"),
    ("train", "step, loop, checkpoint, run folder", "run folder"),
    ("compare", "doctor, advise, drill, sweep", "reports"),
)


def flow() -> Picture:
    """The rooms of the package in the order of the flow, and what leaves each."""
    row, top = 34, 30
    picture = Picture(460, top + row * len(ROOMS) + 26, "The flow of the package")
    picture.text(22, 18, "room", 12.5, GREY, anchor="start")
    picture.text(344, 18, "what goes out", 12.5, GREY, anchor="start")
    for number, (name, does, gives) in enumerate(ROOMS):
        y = top + number * row
        picture.box(18, y, 302, 27, PANEL, GREY, radius=4)
        picture.text(26, y + 18, name, 13, KEPT, "start", bold=True, mono=True)
        picture.text(104, y + 18, does, 12.5, anchor="start")
        if gives:
            picture.arrow((322, y + 13.5), (338, y + 13.5), GREY)
            picture.text(344, y + 18, gives, 12.5, anchor="start")
    bottom = top + row * len(ROOMS)
    picture.arrow((8, top), (8, bottom - 6), LINK, 2)
    picture.text(
        18, bottom + 12, "a room imports only from rooms above it", 12.5, LINK, "start"
    )
    return picture


PICTURES = {"idea": idea, "timeline": timeline, "kernel": kernel, "flow": flow}


def main(arguments: list[str]) -> int:
    """Writes the pictures, or compares them with what is written."""
    stale = []
    for name, draw in PICTURES.items():
        path, content = FOLDER / f"{name}.svg", draw().svg()
        if "--check" in arguments:
            if not path.exists() or path.read_text() != content:
                stale.append(path.name)
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(content)
    if stale:
        print(f"{', '.join(stale)}: draw again with python docs/draw/pictures.py")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
