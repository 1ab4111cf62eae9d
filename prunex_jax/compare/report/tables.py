"""Tables as plain data, and how numbers are written in them."""

import dataclasses
import html
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

_BLANK = "-"
_BYTE_UNITS = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0))

RowT = TypeVar("RowT")


@dataclasses.dataclass(frozen=True)
class Cell:
    """One cell."""

    text: str = _BLANK  # Its lines; the first matters most.
    value: float | None = None  # What it is sorted by.
    is_flagged: bool = False  # Whether it is outside of what is allowed.

    @property
    def shown(self) -> str:
        """Its text, with a mark if it is flagged."""
        return f"{self.text} (!)" if self.is_flagged else self.text


@dataclasses.dataclass(frozen=True)
class Table:
    """One table."""

    title: str  # What it is about, and where.
    # Of all columns, of one line or more; the first column names rows.
    header: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]  # Each as long as the header.
    notes: tuple[str, ...] = ()  # How to read it.

    def markdown(self) -> str:
        r"""The table and its notes as GitHub shows them, without the title.

        Example:
          >>> rows = ((Cell('a|b'), Cell('1 s', is_flagged=True)),)
          >>> print(Table('t', ('method', 'time'), rows).markdown())
          | method | time |
          | --- | ---: |
          | a\|b | 1 s (!) |
        """
        lines = [
            _markdown_line(self.header),
            "| --- |" + " ---: |" * (len(self.header) - 1),
            *(_markdown_line([cell.shown for cell in row]) for row in self.rows),
        ]
        return "\n".join([*lines, *(f"\n{_markdown(note)}" for note in self.notes)])

    def text(self) -> str:
        """The table for a terminal, without title and notes; cells are of one line."""
        lines = [self.header, *([cell.shown for cell in row] for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join([name.ljust(widths[0]), *map(str.rjust, cells, widths[1:])])
            for name, *cells in lines
        )


@dataclasses.dataclass(frozen=True)
class Column(Generic[RowT]):
    """One column of a table."""

    name: str  # Its header.
    # Row -> what its cell holds: a cell, a number, anything else to be written as it
    # is, or None for a blank one.
    content: Callable[[RowT], Any]
    # How a number is written.
    write: Callable[[float], str] = lambda value: digits(value)

    def cell(self, row: RowT) -> Cell:
        """The cell of a row."""
        content = self.content(row)
        if content is None:
            return Cell()
        if isinstance(content, Cell):
            return content
        if is_number(content):
            return Cell(self.write(content), content)
        return Cell(str(content))


def make_table(
    title: str,
    columns: Sequence[Column[RowT]],
    rows: Iterable[RowT],
    notes: Iterable[str] = (),
) -> Table:
    """Builds a table from what its rows are about."""
    cells = tuple(tuple(column.cell(row) for column in columns) for row in rows)
    return Table(title, tuple(column.name for column in columns), cells, tuple(notes))


def method_table(
    title: str,
    called: Mapping[str, str],
    columns: Iterable[Column[str]],
    notes: Iterable[str] = (),
) -> Table:
    """A line for every row of studies or sweeps that any column has something on."""
    columns = list(columns)
    rows = [r for r in called if any(each.content(r) is not None for each in columns)]
    return make_table(
        title, [Column("method", called.__getitem__), *columns], rows, notes
    )


def shown_bytes(count: float) -> str:
    """Writes bytes with three digits.

    Example:
      >>> [shown_bytes(value) for value in (0, 999, 16_800_000, 2.5e9)]
      ['0 B', '999 B', '16.8 MB', '2.50 GB']
    """
    for unit, size in _BYTE_UNITS:
        if abs(count) >= 0.9995 * size:
            return f"{figures(count / size)} {unit}"
    return f"{digits(count)} B"


def figures(value: float) -> str:
    """Writes a measured number with three digits, also where they are zeros.

    Example:
      >>> [figures(value) for value in (0.0812, 0.9999, 1.0, 27.53, 1234.5)]
      ['0.0812', '1.00', '1.00', '27.5', '1,234']
    """
    if not value:
        return "0"
    rounded = float(f"{value:.3g}")
    places = max(0, 2 - math.floor(math.log10(abs(rounded))))
    return f"{value:,.{places}f}"


def digits(value: float) -> str:
    """Writes a number with up to three digits, and never with an exponent.

    Example:
      >>> [digits(value) for value in (0.08126, 1.0, 27.53, 1234.5, 0.000312)]
      ['0.0813', '1', '27.5', '1,234', '0.000312']
    """
    if abs(value) >= 100:
        return f"{value:,.0f}"
    text = f"{float(f'{value:.3g}'):.10f}".rstrip("0").rstrip(".")
    return "0" if text in ("", "-0") else text


def is_number(value: Any) -> bool:
    """Whether a value of a record is a number; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def many(number: int, noun: str) -> str:
    """A number of things: '1 host', '2 hosts'."""
    return f"{number} {noun}" + "s" * (number != 1)


def _markdown_line(texts: Sequence[str]) -> str:
    return "| " + " | ".join(_markdown(text) for text in texts) + " |"


def _markdown(text: str) -> str:
    return html.escape(text, quote=False).replace("|", r"\|").replace("\n", "<br>")
