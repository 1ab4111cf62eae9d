"""Command line of what is measured: `python -m benchmarks NAME [--flag=value ...]`."""

import ast
import runpy
import sys
from pathlib import Path

HERE = Path(__file__).parent


def benchmarks() -> dict[str, str]:
    """Name -> what it does, of all modules and folders here that can be run."""
    files = {
        **{
            path.stem: path for path in sorted(HERE.glob("*.py")) if path.stem[0] != "_"
        },
        **{path.parent.name: path for path in sorted(HERE.glob("*/__main__.py"))},
    }
    trees = {name: ast.parse(path.read_text()) for name, path in files.items()}
    return {
        name: (ast.get_docstring(tree) or "").split("\n\n")[0].replace("\n", " ")
        for name, tree in trees.items()
        if any(isinstance(node, ast.If) for node in tree.body)
    }


def main() -> None:
    """Runs the benchmark that the command line names, or says which there are."""
    found, name = benchmarks(), "".join(sys.argv[1:2])
    if name in found:
        del sys.argv[1]
        runpy.run_module(f"benchmarks.{name}", run_name="__main__", alter_sys=True)
        return
    rows = "".join(f"  {name:<16} {text}\n" for name, text in found.items())
    text = f"usage: python -m benchmarks NAME [--flag=value ...]\n\n{rows}"
    if name in ("", "-h", "--help"):
        sys.stdout.write(text)
        return
    sys.stderr.write(f"error: {name!r} is no benchmark\n{text}")
    sys.exit(2)


if __name__ == "__main__":
    main()
