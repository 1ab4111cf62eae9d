"""Layouts: groups turned inside out, and what is refused."""

import numpy as np
import pytest

from prunex_jax.base.errors import UserError
from prunex_jax.channels import ChannelGroup, ChannelSlice, layouts_of


def group(name, *members, statistics=()):
    made = [
        tuple(ChannelSlice(path, axis, np.array(p)) for path, axis, p in which)
        for which in (members, statistics)
    ]
    return ChannelGroup(name, len(members[0][2]), *made)


A = group("a", ("w", 1, [[0], [2]]), ("rows", 0, [[0, 2], [1, 3]]))
B = group("b", ("w", 1, [[1], [5], [4]]), statistics=[("mean", 0, [[0], [1], [2]])])
SHAPES = {"w": (3, 7), "rows": (4, 1), "other": (2,)}


def test_axes_list_their_owners_and_what_is_nobodys():
    layouts = layouts_of([A, B], SHAPES)
    assert {path: list(axes) for path, axes in layouts.items()} == {
        "w": [1],
        "rows": [0],
    }
    layout = layouts["w"][1]
    assert layout.size == 7
    assert [(name, p.ravel().tolist()) for name, p in layout.slices] == [
        ("a", [0, 2]),
        ("b", [1, 5, 4]),
    ]
    assert layout.free.tolist() == [3, 6]
    assert layout.kept_size({"a": 1, "b": 2}) == 5
    assert layouts["rows"][0].kept_size({"a": 1}) == 2


def test_statistics_have_layouts_of_their_own():
    layouts = layouts_of([A, B], {"mean": (3,), "w": (3, 7)}, "statistics")
    assert list(layouts) == ["mean"]


def test_members_of_other_trees_are_skipped():
    assert list(layouts_of([A, B], {"rows": (4, 1)})) == ["rows"]


@pytest.mark.parametrize(
    ("positions", "is_in_order"),
    [
        ([[0], [1], [2]], True),
        ([[0, 1], [2, 3], [4, 5]], True),
        ([[0, 3], [1, 4], [2, 5]], False),
        ([[1], [0], [2]], False),
    ],
)
def test_axes_in_order_are_recognised(positions, is_in_order):
    size = np.size(positions)
    (layout,) = layouts_of([group("a", ("w", 0, positions))], {"w": (size,)})[
        "w"
    ].values()
    assert layout.is_in_order is is_in_order
    longer = layouts_of([group("a", ("w", 0, positions))], {"w": (size + 1,)})
    assert not longer["w"][0].is_in_order


def test_keys_are_equal_for_axes_divided_alike_only():
    def key(*groups, size=4):
        return layouts_of(groups, {"w": (size,)})["w"][0].key

    plain = group("a", ("w", 0, [[0], [1]]))
    same = group("a", ("v", 0, [[0], [1]]), ("w", 0, [[0], [1]]))
    assert key(plain) == key(same)
    others = [
        key(plain, size=5),
        key(group("b", ("w", 0, [[0], [1]]))),
        key(group("a", ("w", 0, [[1], [0]]))),
        key(group("a", ("w", 0, [[0, 1]]))),
    ]
    assert len({key(plain), *others}) == 5


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (
            [A, group("c", ("w", 1, [[2]]))],
            r"axis 1 of w has a position claimed twice \(groups a, c\)",
        ),
        ([group("c", ("w", 1, [[3], [3]]))], "claimed twice"),
        (
            [group("c", ("w", 1, [[7]]))],
            r"positions outside axis 1 of w \(length 7\); trace the groups again",
        ),
        ([group("c", ("w", 1, [[-1]]))], "positions outside axis 1 of w"),
        ([group("c", ("w", 2, [[0]]))], r"axis 2 does not exist in shape \(3, 7\)"),
        ([group("c", ("w", -1, [[0]]))], "axis -1 does not exist"),
        ([group("c", ("w", 1, [0, 1]))], r"shape \(2,\) should be \(2, positions"),
        (
            [group("c", ("rows", 0, [[0], [1]]), ("w", 1, [[0]]))],
            r"positions of shape \(1, 1\) should be \(2, positions per channel\)",
        ),
    ],
)
def test_groups_that_do_not_fit_are_refused(groups, message):
    with pytest.raises(UserError, match=message):
        layouts_of(groups, SHAPES)
