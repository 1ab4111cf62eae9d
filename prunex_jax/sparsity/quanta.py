"""Says in which steps the kept count of a group moves.

Accelerators like counts that are multiples of 8 or more, and small groups cannot afford
them. So the step of a group follows from its size, unless a table of multiples names
it; see `quanta_of`.
"""

import fnmatch
import re
from collections.abc import Collection, Mapping, Sequence

from prunex_jax.base.errors import UserError, suggest

# A group moves in steps of at most 1/8 of itself, so that rounding to the nearest
# changes its density by at most 1/16.
_QUANTA_PER_GROUP = 8
_ROW = re.compile(r"(?P<names>.*?)(>=(?P<least>\d+))?")


def quantum_of(size: int, round_to: int = 8) -> int:
    """Finds the step in which the kept count of a group moves, by its size.

    The largest power of two up to `round_to` of which the group holds at least eight,
    and 1 for smaller groups.

    Example:
      >>> [quantum_of(size) for size in (5, 16, 32, 64, 512)]
      [1, 2, 4, 8, 8]
    """
    _check_round_to(round_to)
    bound = max(1, min(round_to, size // _QUANTA_PER_GROUP))
    return 1 << (bound.bit_length() - 1)


def quanta_of(
    sizes: Mapping[str, int],
    round_to: int = 8,
    multiples: Mapping[str, int] | None = None,
) -> dict[str, int]:
    """Finds the step of every group.

    The first row of `multiples` that is for a group says its step. Where there is none,
    or the group has fewer channels than the row's multiple, its size does, by
    `quantum_of`. Rows name groups with wildcards, `'blocks/*'`, and perhaps their least
    size, `'*>=512'`.

    Raises:
      UserError: `round_to` or a multiple is below 1, or a row names no group.
    Example:
      >>> sizes = {'stem': 64, 'blocks/0': 512, 'blocks/1': 1024}
      >>> quanta_of(sizes, multiples={'blocks/1': 32, '*>=512': 128})
      {'stem': 8, 'blocks/0': 128, 'blocks/1': 32}
    """
    _check_round_to(round_to)
    rows = []
    for pattern, multiple in (multiples or {}).items():
        _check_multiple(pattern, multiple)
        wildcards, least = _read_pattern(pattern)
        _check_names(pattern, wildcards, sizes)
        rows.append((wildcards, least, multiple))

    def step(name: str, size: int) -> int:
        for wildcards, least, multiple in rows:
            if size >= least and fnmatch.fnmatchcase(name, wildcards):
                return multiple if multiple <= size else quantum_of(size, round_to)
        return quantum_of(size, round_to)

    return {name: step(name, size) for name, size in sizes.items()}


def read_multiples(rows: Sequence[str]) -> dict[str, int]:
    """Reads a table of multiples from settings, one `groups:multiple` per row.

    Example:
      >>> read_multiples(('blocks/1:32', '*>=512:128'))
      {'blocks/1': 32, '*>=512': 128}
    """
    table: dict[str, int] = {}
    for row in rows:
        pattern, number = (part.strip() for part in row.rpartition(":")[::2])
        if not _read_pattern(pattern)[0] or not number.isdecimal():
            raise UserError(
                f"sparsity.multiples has {row!r}; write the groups and their multiple, "
                "such as 'blocks/*:64', or '*>=512:128' for groups of at least 512 "
                "channels"
            )
        if pattern in table:
            raise UserError(
                f"sparsity.multiples has two rows for {pattern!r}; the first that is "
                "for a group counts, so drop one"
            )
        table[pattern] = int(number)
        _check_multiple(pattern, table[pattern])
    return table


def _read_pattern(pattern: str) -> tuple[str, int]:
    """Wildcards of names, and the least size, of a row."""
    match = _ROW.fullmatch(pattern)
    assert match is not None  # it matches any text of one line
    return match["names"], int(match["least"] or 0)


def _check_names(pattern: str, wildcards: str, names: Collection[str]) -> None:
    """Refuses a misspelt row, whose groups would be rounded as if it were not there."""
    if names and not any(fnmatch.fnmatchcase(name, wildcards) for name in names):
        raise UserError(
            f"multiples has a row for {pattern!r}, which names no channel group"
            f"{suggest(wildcards, names)}"
        )


def _check_multiple(pattern: str, multiple: int) -> None:
    if multiple < 1:
        raise UserError(
            f"the multiple {multiple} for {pattern!r} must be at least 1; 1 rounds to "
            "whole channels"
        )


def _check_round_to(round_to: int) -> None:
    if round_to < 1:
        raise UserError(
            f"sparsity.round_to = {round_to} must be at least 1; 1 rounds to whole "
            "channels"
        )
