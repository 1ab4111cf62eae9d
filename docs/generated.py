"""Writes the parts of the reference that are made from the code: settings, commands."""

import contextlib
import dataclasses
import inspect
import io
import re
import typing
from typing import Any


def settings() -> str:
    """Lists every setting: default, range, and the comment above it, by section."""
    from prunex_jax.train.build.config import resolve_config

    return "\n\n".join(_sections("", resolve_config({"run": {"steps": 1}})))


def _sections(prefix: str, values: Any) -> list[str]:
    comments = _comments(type(values))
    types = typing.get_type_hints(type(values))
    rows, below = [], []
    for field in dataclasses.fields(values):
        value = getattr(values, field.name)
        if dataclasses.is_dataclass(value):
            below += _sections(f"{prefix}{field.name}.", value)
            continue
        default = 0 if prefix + field.name == "run.steps" else value
        cells = (
            f"`{prefix}{field.name}`",
            f"`{default!r}`",
            _kind(types[field.name], field.metadata.get("range")),
            comments.get(field.name, ""),
        )
        line = " | ".join(cell.replace("|", "\\|") for cell in cells)
        rows.append(f"| {line} |")
    if not rows:
        return below
    title = f"## {prefix.rstrip('.')}" if prefix else "## The run itself"
    about = (type(values).__doc__ or "").split("\n")[0]
    head = "| setting | default | values | meaning |\n| --- | --- | --- | --- |\n"
    return [f"{title}\n\n{about}\n\n{head}" + "\n".join(rows), *below]


def _kind(kind: Any, limits: Any) -> str:
    if typing.get_origin(kind) is typing.Literal:
        return ", ".join(f"`{choice}`" for choice in typing.get_args(kind))
    named = getattr(kind, "__name__", str(kind))
    if typing.get_args(kind):
        named = str(kind)
    if limits is None:
        return named
    return f"{named}, {limits}".replace("not be ", "not ").replace(", be ", ", ")


def _comments(kind: type) -> dict[str, str]:
    found, comment = {}, []
    sources = [inspect.getsource(cls) for cls in kind.__mro__[:-1] if _has_source(cls)]
    for line in "\n".join(sources).splitlines():
        text = line.strip()
        if text.startswith("#"):
            comment.append(text.removeprefix("#").strip())
        elif field := re.match(r"(\w+): ", text):
            found[field.group(1)] = " ".join(comment)
            comment = []
        else:
            comment = []
    return found


def commands() -> str:
    """Gives what every command says of itself."""
    from prunex_jax.__main__ import COMMANDS, main

    parts = []
    for name, (_, about) in COMMANDS.items():
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            main([name, "--help"])
        parts.append(f"## {name}\n\n{about}\n\n```text\n{text.getvalue().strip()}\n```")
    return "\n\n".join(parts)


def _has_source(kind: type) -> bool:
    """False of the settings that the table of methods composes."""
    try:
        return bool(inspect.getsource(kind))
    except OSError:
        return False
