"""A report as files: an HTML page that needs nothing else, tables.md, PNG plots."""

import base64
import dataclasses
import importlib.resources
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from prunex_jax.base.errors import UserError
from prunex_jax.base.imports import need_package
from prunex_jax.compare.report import plots
from prunex_jax.compare.report.charts import Chart, draw_chart
from prunex_jax.compare.report.plots import Plot
from prunex_jax.compare.report.tables import Cell, Table

REPORT_FILE = "report.html"
TABLES_FILE = "tables.md"
NO_PLOTS = "Plots need matplotlib: pip install 'prunex_jax[report]'"


@dataclasses.dataclass(frozen=True)
class Section:
    """A part of a report."""

    title: str  # Its headline.
    tables: Sequence[Table] = ()  # What it shows.
    plots: Sequence[Plot] = ()  # Before the tables.
    warnings: Sequence[str] = ()  # Before those.
    charts: Sequence[Chart] = ()  # Like plots, but drawn without matplotlib.


def check_packages(png: Path | None = None) -> None:
    """Refuses a report that cannot be made, before anything is run or written.

    Raises:
      UserError: jinja2 is not there, or PNG files are asked for and matplotlib is not.
    """
    need_package("jinja2", "report", "A report")
    if png is not None and not plots.is_available():
        raise UserError(f"--png={png}: {NO_PLOTS}")


def write_page(
    folder: Path,
    title: str,
    notes: Iterable[str],
    sections: Sequence[Section],
    png: Path | None = None,
) -> Path:
    """Writes a report.

    Returns:
      Path of the HTML file.
    Raises:
      UserError: PNG files are asked for, and matplotlib is not there.
    """
    check_packages(png)
    path = folder / REPORT_FILE
    path.write_text(make_page(title, notes, sections), encoding="utf-8")
    tables = [table for section in sections for table in section.tables]
    markdown = (f"### {table.title}\n\n{table.markdown()}\n" for table in tables)
    (folder / TABLES_FILE).write_text("\n".join(markdown), encoding="utf-8")
    if png is not None:
        png.mkdir(parents=True, exist_ok=True)
        for plot in (plot for section in sections for plot in section.plots):
            (png / f"{plot.name}.png").write_bytes(plots.render(plot))
    return path


def make_page(title: str, notes: Iterable[str], sections: Iterable[Section]) -> str:
    """The page as HTML; whatever records say is text in it."""
    import jinja2
    import markupsafe

    has_plots = plots.is_available()
    shown = [each for each in sections if _has_content(each)]
    is_missing = not has_plots and any(each.plots for each in shown)
    template = importlib.resources.files(__package__).joinpath("page.html").read_text()
    environment = jinja2.Environment(
        autoescape=True,
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.from_string(template).render(
        title=title,
        notes=[*notes, *([f"{NO_PLOTS}."] if is_missing else [])],
        sections=shown,
        pictures={
            each.title: [_picture(plot) for plot in each.plots] if has_plots else []
            for each in shown
        },
        charts={
            each.title: [markupsafe.Markup(draw_chart(chart)) for chart in each.charts]
            for each in shown
        },
    )


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
    return bool(section.tables or section.plots or section.warnings or section.charts)


def _picture(plot: Plot) -> dict[str, str]:
    """A plot for both themes, as addresses that hold it."""
    found = {"title": plot.title}
    for theme in plots.THEMES:
        svg = base64.b64encode(plots.render(plot, "svg", theme)).decode()
        found[theme] = f"data:image/svg+xml;base64,{svg}"
    return found


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, list | tuple):
        if not any(isinstance(each, Mapping | list | tuple) for each in value):
            yield name, "\n".join(map(str, value))
            return
        value = {str(number): each for number, each in enumerate(value)}
    if not isinstance(value, Mapping):
        yield name, str(value)
        return
    for key, each in value.items():
        yield from _flat(each, f"{name}.{key}" if name else key)
