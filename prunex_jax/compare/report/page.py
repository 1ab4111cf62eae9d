"""A report as files: an HTML page that needs nothing else, tables.md, PNG plots."""

import base64
import dataclasses
import importlib.resources
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from prunex_jax.base.imports import need_package
from prunex_jax.compare.report.plots import Plot, render
from prunex_jax.compare.report.tables import Cell, Table
from prunex_jax.train.build.config import dotted_keys

REPORT_FILE = "report.html"
_TABLES_FILE = "tables.md"


@dataclasses.dataclass(frozen=True)
class Section:
    """A part of a report."""

    title: str  # Its headline.
    tables: Sequence[Table] = ()  # What it shows.
    plots: Sequence[Plot] = ()  # Before the tables.
    warnings: Sequence[str] = ()  # Before those.


def check_packages() -> None:
    """Refuses a report that cannot be made, before anything is run or written."""
    for package in ("jinja2", "matplotlib"):
        need_package(package, "report", "A report")


def write_page(
    folder: Path,
    title: str,
    notes: Iterable[str],
    sections: Sequence[Section],
    png: Path | None = None,
) -> Path:
    """Writes a report, and its plots as PNG files too if a folder for them is given."""
    check_packages()
    path = folder / REPORT_FILE
    path.write_text(make_page(title, notes, sections), encoding="utf-8")
    tables = [table for section in sections for table in section.tables]
    markdown = (f"### {table.title}\n\n{table.markdown()}\n" for table in tables)
    (folder / _TABLES_FILE).write_text("\n".join(markdown), encoding="utf-8")
    if png is not None:
        png.mkdir(parents=True, exist_ok=True)
        for plot in (plot for section in sections for plot in section.plots):
            (png / f"{plot.name}.png").write_bytes(render(plot))
    return path


def make_page(title: str, notes: Iterable[str], sections: Iterable[Section]) -> str:
    """The page as HTML; whatever records say is text in it."""
    import jinja2

    template = importlib.resources.files(__package__).joinpath("page.html").read_text()
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["picture"] = _picture
    shown = [each for each in sections if each.tables or each.plots or each.warnings]
    return environment.from_string(template).render(
        title=title, notes=list(notes), sections=shown
    )


def facts_table(title: str, facts: Mapping[str, Any]) -> Table:
    """Any plain values as a table of names and texts; nested ones by dotted name, lists
    with a line for each entry.

    Example:
      >>> table = facts_table('machine', {'cores': 2, 'versions': {'jax': '1'}})
      >>> [tuple(cell.text for cell in row) for row in table.rows]
      [('cores', '2'), ('versions.jax', '1')]
    """

    def text(value: Any) -> str:
        return "\n".join(map(str, value)) if isinstance(value, list) else str(value)

    keys = dotted_keys(facts)
    rows = tuple((Cell(key), Cell(text(value))) for key, value in keys.items())
    return Table(title, ("", "value"), rows)


def _picture(plot: Plot) -> str:
    """A plot as an address that holds it."""
    return f"data:image/svg+xml;base64,{base64.b64encode(render(plot, 'svg')).decode()}"
