"""What the command lines of the package share: flags, help, errors, exit codes.

A command is described as data and parsed by argparse, so that all of them refuse
unknown flags, stray arguments and bad values alike: in one line, with exit code 2 and
without a traceback.
"""

import argparse
import contextlib
import dataclasses
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from prunex_jax.base.errors import TrainingDivergedError, UserError, one_line, suggest

# Values of the flags of a command, as attributes.
Values = argparse.Namespace
EXIT_DIVERGED = 1
EXIT_BAD_INPUT = 2
EXIT_LOST = 69  # Another process of the run failed or was lost.
EXIT_FAILED = 70  # This one of several failed, of something unforeseen.
EXIT_STALLED = 124  # A step, a save or another phase came to a halt.
# Stopped and saved, so that the same command goes on: EX_TEMPFAIL, "try again later".
EXIT_STOPPED = 75
_SETTING = re.compile(r"--(no)?config\.")
# Below the shipped `configs`: what a flag may name without a path.
_SHIPPED = {"config": "", "sweep": "sweeps"}
_BOOLS = {"true": True, "t": True, "1": True, "false": False, "f": False, "0": False}


@dataclasses.dataclass(frozen=True)
class Flag:
    """One flag of a command, given as `--name=value` or `--name value`."""

    name: str  # Without dashes.
    default: str | int | bool  # Also says the type: str, int or bool.
    text: str  # What it does, for `--help`.
    choices: tuple[str, ...] = ()  # The only values of a string; empty allows any.
    is_required: bool = False  # Whether it must be given.
    bare: str = ""  # What a string is if only `--name` is given; empty refuses that.
    at_least: int | None = None  # Of a number; None allows any.


@dataclasses.dataclass(frozen=True)
class Command:
    """A command line, as data."""

    text: str  # What `--help` shows before the flags.
    flags: tuple[Flag, ...]  # Its flags.
    takes_settings: bool = False  # Whether it understands `--config.KEY=VALUE` too.
    takes_paths: bool = False  # Whether it understands arguments that are no flags.


def run_command(
    command: Command,
    run: Callable[[Values, list[str]], int | None],
    arguments: Sequence[str] | None = None,
) -> int:
    """Parses a command line, runs the command and gives the exit code.

    `run` gets the values of the flags and what is given without a flag: settings, each
    as `--config.KEY=VALUE`, `--config.KEY` or `--noconfig.KEY`, or paths. It may give
    an exit code. After an error one line is on the error output.

    Example:
      >>> command = Command('Greets.', (Flag('name', 'world', 'Whom.'),))
      >>> greet = lambda values, rest: print(f'hello {values.name}')
      >>> run_command(command, greet, ['--name=there'])
      hello there
      0
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if "--help" in arguments or "-h" in arguments:
        sys.stdout.write(_parser(command).format_help())
        return 0
    try:
        return run(*_parse(command, arguments)) or 0
    except TrainingDivergedError as error:
        return _fail(error, EXIT_DIVERGED)
    except UserError as error:
        return _fail(error, EXIT_BAD_INPUT)
    except SystemExit as error:
        said = f"sys.exit({error.code!r}) was called before the command had ended"
        return _fail(f"{said}, perhaps by a plugin; leave it out there", EXIT_FAILED)
    except MemoryError as error:
        said = f"there is not enough memory for this ({one_line(error, 200)})"
        remedy = "ask for less, such as smaller batches or files"
        return _fail(f"{said}; {remedy}", EXIT_BAD_INPUT)
    except BrokenPipeError:
        # Whoever reads the output has seen enough; Python would complain at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except RuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):  # As jax says it.
            raise
        said = f"a device has not enough memory for this ({one_line(error, 200)})"
        return _fail(f"{said}; ask for less, such as smaller batches", EXIT_BAD_INPUT)
    except OSError as error:
        if error.filename is None:  # Not of a path that somebody has given.
            raise
        said = f"{error.filename} cannot be used ({error.strerror})"
        remedy = "choose another path, or make it readable and writable"
        return _fail(f"{said}; {remedy}", EXIT_BAD_INPUT)


def find_file(given: str | Path, flag: str) -> Path:
    """Finds the file of a flag: by its path, or a shipped one by its bare name."""
    with contextlib.suppress(OSError):  # Such as of a name that is too long.
        if Path(given).is_file():
            return Path(given)
    if flag not in _SHIPPED:
        raise UserError(f"--{flag}={given} is not a file")
    package = Path(__file__).parents[1]
    # Part of the package where it is installed, and beside it in the repository.
    roots = (package, package.parent)
    homes = [root / "configs" / _SHIPPED[flag] for root in roots]
    shipped = next((home for home in homes if home.is_dir()), homes[0])
    names = {path.stem: path for path in sorted(shipped.glob("*.py"))}
    name = str(given).removesuffix(".py")
    if name not in names:
        raise UserError(
            f"--{flag}={given} is not a file, nor the name of one in {shipped}"
            f"{suggest(name, names)}"
        )
    return names[name]


def call_in_file(file: str | Path, flag: str, function: str, *arguments: Any) -> Any:
    """Calls a function of a Python file that a flag names, as `find_file` finds it.

    The file may import its neighbours. A UserError says what is wrong with it.
    """
    path = find_file(file, flag)
    spec = importlib.util.spec_from_file_location(f"prunex_jax_{flag}", path)
    if spec is None or spec.loader is None:
        raise UserError(f"--{flag}={file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
        called = getattr(module, function)
        _check_takes(called, arguments, f"--{flag}={file}: {function}")
        return called(*arguments)
    except UserError:
        raise
    # Also SystemExit: a file that exits must not end the command as if it were done.
    except BaseException as error:
        raise UserError(
            f"--{flag}={file} cannot be loaded: {one_line(error)}"
        ) from error
    finally:
        sys.path.remove(str(path.parent))


def _check_takes(called: Any, arguments: tuple[Any, ...], name: str) -> None:
    """Refuses arguments that a function of a file does not take."""
    try:
        signature = inspect.signature(called)
    except (TypeError, ValueError) as error:
        raise UserError(f"{name} is no function; define it with def") from error
    try:
        signature.bind(*arguments)
    except TypeError as error:
        given = ":".join(map(str, arguments)) or "none"
        raise UserError(
            f"{name}{signature} cannot be called with argument {given}; change what "
            "stands after the colon"
        ) from error


def split_list(text: str) -> tuple[str, ...]:
    """Parts of a flag that takes several values.

    Example:
      >>> split_list('dense, hsadmm,')
      ('dense', 'hsadmm')
    """
    return tuple(part.strip() for part in text.split(",") if part.strip())


def true_or_false(text: str) -> bool:
    """Reads true or false, t or f, 1 or 0; ValueError for something else."""
    if text.lower() not in _BOOLS:
        raise ValueError(f"{text!r} is neither true nor false")
    return _BOOLS[text.lower()]


def say(text: str) -> None:
    """Writes a line to the output, where it is seen at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def warn(text: str) -> None:
    """Writes a line to the error output, where it is seen at once."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


class _Parser(argparse.ArgumentParser):
    """Raises instead of printing its usage and exiting."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; --help shows the command line")


def _parser(command: Command) -> _Parser:
    parser = _Parser(
        usage=argparse.SUPPRESS,
        description=command.text.strip(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument("-h", "--help", action="store_true", help="Show this text.")
    for flag in command.flags:
        options: dict[str, Any] = {"default": flag.default, "type": type(flag.default)}
        text = flag.text.replace("%", "%%")
        if isinstance(flag.default, bool):
            options |= {"type": true_or_false, "nargs": "?", "const": True}
            options["metavar"] = "true|false"
            parser.add_argument(
                f"--no{flag.name}",
                action="store_false",
                dest=flag.name,
                default=flag.default,
                help=argparse.SUPPRESS,
            )
        elif flag.choices:
            options["choices"] = flag.choices
        if flag.bare:
            options |= {"nargs": "?", "const": flag.bare}
        if flag.is_required:
            text += " Required."
        elif flag.default not in ("", False):
            text += f" Default: {flag.default}."
        parser.add_argument(f"--{flag.name}", help=text, **options)
    return parser


def _parse(command: Command, arguments: Sequence[str]) -> tuple[Values, list[str]]:
    """Splits the command line into values of flags and settings."""
    own, settings = [], []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if not (command.takes_settings and _SETTING.match(argument)):
            own.append(argument)
            continue
        is_complete = "=" in argument or argument.startswith("--no")
        if not is_complete and rest and not rest[0].startswith("--"):
            argument += f"={rest.pop(0)}"
        settings.append(argument)
    values, unknown = _parser(command).parse_known_args(own)
    if command.takes_paths:
        settings += [argument for argument in unknown if argument[:1] not in ("-", "")]
        unknown = [argument for argument in unknown if argument[:1] in ("-", "")]
    for argument in unknown:
        known = [f"--{flag.name}" for flag in command.flags]
        close = suggest(argument.partition("=")[0], known)
        raise UserError(
            f"argument {argument!r} is not understood{close}; --help shows the "
            "command line"
        )
    for flag in command.flags:
        if flag.is_required and not getattr(values, flag.name):
            raise UserError(f"--{flag.name} is required; --help shows the command line")
        value, least = getattr(values, flag.name), flag.at_least
        if least is not None and value < least:
            raise UserError(f"--{flag.name}={value} must be at least {least}")
    return values, settings


def _fail(error: Exception | str, code: int) -> int:
    sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
    return code
