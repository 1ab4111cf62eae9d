"""SHA-256 of files, to notice bytes that are not as they were written.

Checkpoints and exported models list the digests of their files in their manifest, and
are compared with it before anything reads them.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path


def digests_of(folder: Path) -> dict[str, str]:
    """Takes the SHA-256 of every file below a folder.

    Args:
      folder: Any folder; a missing one has no files.
    Returns:
      Path of the file below the folder, with `/` -> digest in hexadecimal digits.
    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     _ = (Path(folder) / 'a').write_text('hello')
      ...     digests_of(Path(folder))['a'][:16]
      '2cf24dba5fb0a30e'
    """
    digests = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        digests[path.relative_to(folder).as_posix()] = digest
    return digests


def find_damage(files: Mapping[str, str], found: Mapping[str, str]) -> str:
    """Says which file is missing or altered.

    Args:
      files: What `digests_of` gave when the files were written.
      found: What it gives now; files that were not there then do not matter.
    Returns:
      What is wrong with the first such file, or an empty string.
    Example:
      >>> find_damage({'a': '1', 'b': '2'}, {'a': '1', 'b': '3'})
      'b is not as it was written'
    """
    for name, digest in files.items():
        if name not in found:
            return f"{name} is missing"
        if found[name] != digest:
            return f"{name} is not as it was written"
    return ""
