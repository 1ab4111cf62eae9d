"""Which slow tests a run takes: those above what changed, and a share of like cases.

The import contract in pyproject.toml says which rooms lie above a room. A change in one
takes the slow tests of it and of all above it; a change of what every test stands on,
or of a file that no rule knows, takes all of them. `make test-slow` prints what it
took.
"""

import ast
import dataclasses
import functools
import hashlib
import re
import subprocess
import tomllib
from collections.abc import Iterable
from pathlib import Path

from tests.helpers.common import ROOT

# One of so many cases that take turns runs each time.
TURNS = 4

# Tests of what measures this project, which uses all rooms.
_BENCHMARKS = "benchmarks"
# Files outside of the package, and the places in tests/ that read them.
_READERS = {
    "configs": ("train", "compare", _BENCHMARKS),
    "examples": ("train/test_launchers.py",),
    "docs": (),
    "notebooks": (),
    "mkdocs.yml": (),
    "README.md": (),
    "CHANGELOG.md": (),
    "CITATION.cff": (),
    "CONTRIBUTING.md": (),
    "LICENSE": (),
    ".gitignore": (),
    ".ci/tested": (),
}


@dataclasses.dataclass(frozen=True)
class Selection:
    """The slow tests that a change asks for.

    Attributes:
      places: Folders and files in tests/ whose slow tests run; None for all. Those in
        tests/ itself, of the docs and examples, always do.
      reason: Why.
    """

    places: frozenset[str] | None
    reason: str

    def takes(self, file: Path) -> bool:
        """Whether the slow tests of a file run."""
        if self.places is None or not file.is_relative_to(ROOT / "tests"):
            return True
        inside = file.relative_to(ROOT / "tests")
        return len(inside.parts) == 1 or not self.places.isdisjoint(
            (inside.parts[0], str(inside))
        )

    def __str__(self) -> str:
        if self.places is None:
            return f"all of them, {self.reason}"
        return f"{', '.join(sorted(self.places)) or 'none of a room'}, {self.reason}"


def select(base: str) -> Selection:
    """The slow tests that what changed since a commit asks for; all without one."""
    if not base:
        return Selection(None, "as no commit is given to compare with")
    changed = changed_files(base)
    if changed is None:
        return Selection(None, f"as {base} is not in the history here")
    return selection_of(changed, f"since {base[:12]}")


def selection_of(changed: Iterable[str], since: str) -> Selection:
    """The slow tests that changed files ask for.

    Args:
      changed: Paths in the repository.
      since: What a reader is told of the change.
    """
    rooms, places = rooms_from_the_top(), set[str]()
    for file in sorted(changed):
        found = _places_of(file, rooms)
        if found is None:
            return Selection(None, f"as {file} changed {since}")
        places |= found
    return Selection(frozenset(places), f"by what changed {since}")


def _places_of(file: str, rooms: list[str]) -> set[str] | None:
    """What to run for a changed file; None is all, as for a file that no rule knows."""
    folder, _, rest = file.partition("/")
    readers = _READERS.get(file, _READERS.get(folder))
    if readers is not None:
        return set(readers)
    if folder == "tests":
        return _users_of(file)
    if folder == _BENCHMARKS:
        users = _users_of(file)
        return None if users is None else users | {_BENCHMARKS}
    room = rest.partition("/")[0].removesuffix(".py")
    if folder != "prunex_jax" or room not in rooms[:-1]:  # All stand on the last one.
        return None
    return {*rooms[: rooms.index(room) + 1], _BENCHMARKS}


def _users_of(changed: str) -> set[str] | None:
    """The tests that use a changed file, also through others; itself if it is one."""
    mentions, found, new = _mentions(), set[str](), {changed}
    while new:
        found |= new
        names = new | {_module_of(file) for file in new}
        new = {file for file, said in mentions.items() if said & names} - found
    if "tests/conftest.py" in found:
        return None
    files = {Path(file) for file in found if file.startswith("tests/")}
    tests = {f.relative_to("tests") for f in files if f.name.startswith("test_")}
    return {str(file) for file in tests if len(file.parts) > 1}


@functools.cache
def _mentions() -> dict[str, set[str]]:
    """Every file of tests/ and benchmarks/, with what it mentions there."""
    files = [f for name in ("tests", _BENCHMARKS) for f in (ROOT / name).rglob("*.py")]
    return {str(path.relative_to(ROOT)): _mentioned(path) for path in files}


def _mentioned(path: Path) -> set[str]:
    """Modules and files that a file imports, or names in a string."""
    text = path.read_text()
    found = set(re.findall(r"\b(?:tests|benchmarks)(?:[./]\w+)+", text))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            found |= {f"{node.module}.{name.name}" for name in node.names}
    return found


def _module_of(file: str) -> str:
    return ".".join(Path(file).with_suffix("").parts).removesuffix(".__init__")


def rooms_from_the_top() -> list[str]:
    """The layers of the import contract, the highest first."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contract, *_ = settings["tool"]["importlinter"]["contracts"]
    layers: list[str] = contract["layers"]
    return layers


def changed_files(base: str) -> set[str] | None:
    """What differs from a commit: committed, not committed, and not yet added."""
    differing = _git("diff", "--name-only", "--no-renames", base, "--")
    new = _git("ls-files", "--others", "--exclude-standard")
    if differing is None or new is None:
        return None
    return {*differing.split("\n"), *new.split("\n")} - {""}


def _git(*arguments: str) -> str | None:
    """What git prints; None where it fails, as without a repository."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None


def has_its_turn(test: str, sample: str) -> bool:
    """Whether a case that takes turns runs this time.

    Args:
      test: Its name.
      sample: Any text, as the hash of a commit; the same text takes the same cases.
    """
    digest = hashlib.sha256(f"{sample} {test}".encode()).digest()
    return int.from_bytes(digest[:8]) % TURNS == 0
