"""What an exported folder says of itself, as strict JSON.

    format        1; readers refuse a later one
    files         file -> SHA-256
    program       how to call it: platforms, inputs, outputs, as in float32[batch,8,8,1]
    arrays        path -> type and shape
    channels      per group: name, original width `size`, `kept` positions
    certificate   what masked and shrunk function differ by; null if nothing was cut
    versions      of jax, this package, python and others, at the time of the export

and whatever the caller adds. The trainer adds

    trained         workdir, step and method
    dataset         name; how images become inputs: `preprocessing`; `classes`
    metrics         summary.json of the run, if the export is of its end; `logged`: the
                    last row logged
    config          all settings, resolved
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from prunex_jax.base.environment import versions
from prunex_jax.base.errors import UserError
from prunex_jax.channels import ChannelGroup
from prunex_jax.shrink import Certificate

MANIFEST = "manifest.json"
FORMAT = 1
_OWN_KEYS = (
    "format",
    "files",
    "program",
    "arrays",
    "channels",
    "certificate",
    "versions",
)


def make_manifest(
    *,
    files: Mapping[str, str],
    program: Mapping[str, Any],
    arrays: Mapping[str, np.ndarray],
    channels: Sequence[Mapping[str, Any]],
    certificate: Certificate | None,
    about: Mapping[str, Any],
) -> dict[str, Any]:
    """Puts the manifest together.

    Args:
      files: File -> SHA-256.
      program: From `make_program`.
      arrays: Path -> array.
      channels: From `kept_channels`.
      certificate: What proves the cut; None if nothing was cut.
      about: Further sections.
    Returns:
      Plain values.
    """
    return {
        "format": FORMAT,
        **about,
        "channels": list(channels),
        "certificate": None if certificate is None else certificate.as_dict(),
        "versions": versions(),
        "program": dict(program),
        "arrays": {
            path: f"{array.dtype}[{','.join(map(str, array.shape))}]"
            for path, array in arrays.items()
        },
        "files": dict(files),
    }


def check_about(about: Mapping[str, Any]) -> None:
    """Refuses sections that cannot be written, before long work.

    Raises:
      UserError: A section has a name of the manifest's own, or JSON cannot hold it.
    """
    for name, section in about.items():
        if name in _OWN_KEYS:
            raise UserError(
                f"about[{name!r}] would replace the manifest's own section; choose "
                "another name"
            )
        try:
            json.dumps(section, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise UserError(
                f"about[{name!r}] cannot be written as JSON ({error}); give finite "
                "numbers, strings, lists and dicts"
            ) from error


def kept_channels(
    groups: Sequence[ChannelGroup], masks: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Says which channels of the full function are left.

    Args:
      groups: Channel groups of the full function.
      masks: bool[size] per group, True where kept; groups without one stayed whole.
    Returns:
      One entry per group: name, original width, sorted positions kept.
    Raises:
      UserError: A mask fits no group.
    """
    sizes = {group.name: group.size for group in groups}
    for name, mask in masks.items():
        if np.shape(mask) != (sizes.get(name),):
            raise UserError(
                f"the mask of {name!r} has shape {np.shape(mask)} and fits no channel "
                "group; give the groups that the masks were made for"
            )
    return [
        {
            "name": name,
            "size": size,
            "kept": np.flatnonzero(masks.get(name, np.ones(size, bool))).tolist(),
        }
        for name, size in sizes.items()
    ]


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Writes the manifest into a folder that nobody reads yet."""
    content = json.dumps(manifest, indent=1, allow_nan=False) + "\n"
    (folder / MANIFEST).write_text(content, encoding="utf-8")


def read_manifest(folder: Path) -> dict[str, Any]:
    """Reads the manifest of an export.

    Raises:
      UserError: The folder is no export, or of a later format.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        written_as = manifest["format"]
        complete = all(key in manifest for key in _OWN_KEYS)
    except (OSError, ValueError, KeyError, TypeError):
        written_as, complete = FORMAT, False
    if written_as != FORMAT:
        raise UserError(
            f"{folder} has format {written_as} and this version reads {FORMAT}; use "
            "the version of prunex_jax that wrote it"
        )
    if not complete:
        raise UserError(
            f"{folder} is no exported model: it has no readable {MANIFEST}; give a "
            "folder made by python -m prunex_jax export"
        )
    return manifest
