"""Reports as one HTML file that needs nothing else, offline, on a phone or a screen.

It owns HTML, style, and escaping: whatever records say is text. It leaves what is in
a report to `report`.
"""

import base64
import dataclasses
import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from prunex_jax.bench.report.cells import Cell, Table, shown

# Nothing is loaded from anywhere, whatever the file says.
_POLICY = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'"
)
_STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --paper: #fff; --line: #d5d5d5;
  --soft: #666; --band: #f4f4f4; --flag: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e8e8; --paper: #151515;
  --line: #3a3a3a; --soft: #a0a0a0; --band: #202020; --flag: #ff8a80; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 75rem; color: var(--ink);
  background: var(--paper); font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; } h2 { margin-top: 2.5rem; font-size: 1.3rem; }
h3 { margin: 1.5rem 0 .5rem; font-size: 1rem; }
p { max-width: 45rem; } .note { color: var(--soft); font-size: .85rem; }
.flag { color: var(--flag); font-weight: bold; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem;
  font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid var(--line); text-align: right;
  vertical-align: top; white-space: nowrap; }
th:first-child, td:first-child { position: sticky; left: 0; background: var(--paper);
  text-align: left; font-weight: normal; white-space: normal; min-width: 8rem;
  max-width: 16rem; }
thead th { background: var(--band); vertical-align: bottom; }
thead th:first-child { background: var(--band); }
thead button { all: unset; cursor: pointer; font-weight: bold; }
thead button:focus-visible { outline: 2px solid; }
th[aria-sort=ascending] button::after { content: " \\2191"; }
th[aria-sort=descending] button::after { content: " \\2193"; }
td small { color: var(--soft); }
.facts td { white-space: normal; overflow-wrap: anywhere; text-align: left; }
.plots { display: grid; gap: 1rem; align-items: start;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); }
.plots img { width: 100%; max-width: 36rem; height: auto; }
"""
# Clicking a header sorts by it: numbers by their values, everything else by its text.
_SCRIPT = """
for (const button of document.querySelectorAll("thead button"))
  button.addEventListener("click", () => {
    const head = button.parentElement, body = head.closest("table").tBodies[0];
    const up = head.getAttribute("aria-sort") !== "ascending";
    const key = row => row.cells[head.cellIndex].dataset.value;
    const text = row => row.cells[head.cellIndex].textContent;
    const order = (a, b) => {
      const [x, y] = [key(a), key(b)];
      if (x === undefined && y === undefined)
        return up ? text(a).localeCompare(text(b)) : text(b).localeCompare(text(a));
      if (x === undefined || y === undefined) return x === undefined ? 1 : -1;
      return up ? x - y : y - x;
    };
    const rows = [...body.rows].sort(order);
    for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    body.append(...rows);
  });
"""


@dataclasses.dataclass(frozen=True)
class Picture:
    """A plot, drawn for both themes.

    Attributes:
      title: What it shows, for those who do not see it.
      light: SVG.
      dark: SVG.
    """

    title: str
    light: bytes
    dark: bytes


@dataclasses.dataclass(frozen=True)
class Section:
    """A part of a report.

    Attributes:
      title: Its headline.
      tables: What it shows.
      pictures: After the tables.
      notes: Before them.
      warnings: Before those.
    """

    title: str
    tables: Sequence[Table] = ()
    pictures: Sequence[Picture] = ()
    notes: Sequence[str] = ()
    warnings: Sequence[str] = ()


def make_page(title: str, notes: Iterable[str], sections: Iterable[Section]) -> str:
    """Writes a whole page.

    Args:
      title: Of the page.
      notes: What the numbers are, at the top.
      sections: In order; empty ones are left out.
    """
    parts = [_section(section) for section in sections if _has_content(section)]
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_text(_POLICY)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{_text(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{_text(title)}</h1>
{"".join(f"<p>{_text(note)}</p>" for note in notes)}
{"".join(parts)}
<script>{_SCRIPT}</script>
</body>
</html>
"""


def facts_table(title: str, facts: Mapping[str, Any]) -> Table:
    """Any plain values as a table of names and texts; nested ones by dotted name.

    Example:
      >>> table = facts_table('machine', {'cores': 2, 'versions': {'jax': '1'}})
      >>> [tuple(cell.text for cell in row) for row in table.rows]
      [('cores', '2'), ('versions.jax', '1')]
    """
    rows = tuple((Cell(name), Cell(text)) for name, text in _flat(facts))
    return Table(title, ("", "value"), rows)


def _has_content(section: Section) -> bool:
    return bool(section.tables or section.pictures or section.warnings)


def _section(section: Section) -> str:
    parts = [f"<section>\n<h2>{_text(section.title)}</h2>\n"]
    parts += [f'<p class="flag">{_text(text)}</p>\n' for text in section.warnings]
    parts += [f"<p>{_text(note)}</p>\n" for note in section.notes]
    parts += [_table(table) for table in section.tables]
    if section.pictures:
        pictures = "".join(map(_picture, section.pictures))
        parts.append(f'<div class="plots">{pictures}</div>\n')
    return "".join([*parts, "</section>\n"])


def _table(table: Table) -> str:
    header = "".join(
        f'<th scope="col"><button type="button">{_lines(text)}</button></th>'
        for text in table.header
    )
    rows = "".join(_row(row) for row in table.rows)
    notes = "".join(f'<p class="note">{_text(note)}</p>\n' for note in table.notes)
    kind = ' class="facts"' if table.header[1:] == ("value",) else ""
    return (
        f"<h3>{_text(table.title)}</h3>\n"
        f'<div class="scroll"><table{kind}>\n<thead><tr>{header}</tr></thead>\n'
        f"<tbody>{rows}</tbody>\n</table></div>\n{notes}"
    )


def _row(row: Sequence[Cell]) -> str:
    name, *cells = row
    return (
        f'<tr><th scope="row">{_lines(name.text)}</th>'
        f"{''.join(map(_cell, cells))}</tr>\n"
    )


def _cell(cell: Cell) -> str:
    value = "" if cell.value is None else f' data-value="{float(cell.value)!r}"'
    kind = ' class="flag"' if cell.is_flagged else ""
    return f"<td{value}{kind}>{_lines(shown(cell))}</td>"


def _lines(text: str) -> str:
    """Text of one line or more; all but the first are small."""
    first, *rest = text.split("\n")
    return _text(first) + "".join(f"<br><small>{_text(line)}</small>" for line in rest)


def _picture(picture: Picture) -> str:
    return (
        "<picture>"
        f'<source srcset="{_data(picture.dark)}" media="(prefers-color-scheme: dark)">'
        f'<img src="{_data(picture.light)}" alt="{_text(picture.title)}">'
        "</picture>\n"
    )


def _data(svg: bytes) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"


def _text(text: str) -> str:
    return html.escape(text, quote=True)


def _flat(value: Any, name: str = "") -> list[tuple[str, str]]:
    if isinstance(value, Mapping):
        dot = f"{name}." if name else ""
        return [pair for key in value for pair in _flat(value[key], f"{dot}{key}")]
    if isinstance(value, list | tuple):
        if any(isinstance(each, Mapping | list | tuple) for each in value):
            numbered = {str(number): each for number, each in enumerate(value)}
            return _flat(numbered, name)
        return [(name, "\n".join(map(str, value)))]
    return [(name, str(value))]
