"""A report as files: one page, its tables as markdown, its plots as PNG."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from prunex_jax.base.errors import UserError
from prunex_jax.bench.report import pictures
from prunex_jax.bench.report.pages import Section, make_page

REPORT_FILE = "report.html"
TABLES_FILE = "tables.md"
NO_PLOTS = "Plots need matplotlib: pip install 'prunex_jax[bench]'"


def check_png(png: Path | None) -> None:
    """Refuses plots that cannot be drawn, before anything is written.

    Raises:
      UserError: PNG files are asked for, and matplotlib is not there.
    """
    if png is not None and not pictures.is_available():
        raise UserError(f"--png={png}: {NO_PLOTS}")


def write_files(
    folder: Path,
    title: str,
    notes: Iterable[str],
    sections: Sequence[Section],
    plots: Sequence[pictures.Plot],
    png: Path | None = None,
) -> Path:
    """Writes a report.

    Args:
      folder: Gets `report.html` and `tables.md`.
      title: Of the page.
      notes: At its top; that there are no plots, if so, is added.
      sections: All of it.
      plots: Written to `png`; the page has those of its sections.
      png: Gets the plots as PNG files; None draws none.
    Returns:
      Path of the HTML file.
    Raises:
      UserError: PNG files are asked for, and matplotlib is not there.
    """
    check_png(png)
    if not pictures.is_available():
        notes = [*notes, f"{NO_PLOTS}."]
    path = folder / REPORT_FILE
    path.write_text(make_page(title, notes, sections), encoding="utf-8")
    (folder / TABLES_FILE).write_text(tables_markdown(sections), encoding="utf-8")
    if png is not None:
        png.mkdir(parents=True, exist_ok=True)
        for plot in plots:
            (png / f"{plot.name}.png").write_bytes(pictures.render(plot))
    return path


def tables_markdown(sections: Sequence[Section]) -> str:
    """All tables of a report as markdown."""
    parts = [
        f"### {table.title}\n\n{table.markdown()}\n"
        for section in sections
        for table in section.tables
    ]
    return "\n".join(parts)
