"""What the command lines of the package share: flags, help, errors, exit codes.

It owns absl's flags. A command is described as data, so that all of them refuse unknown
flags, stray arguments and bad values alike: in one line, with exit code 2 and without a
traceback. It leaves to each command what is done.
"""

import dataclasses
import importlib.util
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from absl import flags

from prunex_jax.base.errors import TrainingDivergedError, UserError, suggest

# Values of the flags of a command, as attributes.
Values = flags.FlagValues
EXIT_DIVERGED = 1
EXIT_BAD_INPUT = 2


class Named(Protocol):
    """What has a name, such as a row."""

    @property
    def name(self) -> str:
        """Its key."""
        ...


NamedT = TypeVar("NamedT", bound=Named)


@dataclasses.dataclass(frozen=True)
class Flag:
    """One flag of a command.

    Attributes:
      name: Without dashes.
      default: Also says the type: str, int or bool.
      text: What it does, for `--help`.
      choices: The only values of a string; empty allows any.
      is_required: Whether it must be given.
    """

    name: str
    default: str | int | bool
    text: str
    choices: tuple[str, ...] = ()
    is_required: bool = False


@dataclasses.dataclass(frozen=True)
class Command:
    """A command line, as data.

    Attributes:
      name: As in `python -m NAME`.
      text: What `--help` shows before the flags.
      flags: Its flags.
      passes_on: Whether an argument is for the command itself to understand.
      hint: Remedy for an argument that is no flag.
    """

    name: str
    text: str
    flags: tuple[Flag, ...]
    passes_on: Callable[[str], bool] = lambda argument: False
    hint: str = "write --name=value with an equals sign; --help shows the command line"


def run_command(
    command: Command,
    run: Callable[[Values, list[str]], None],
    arguments: Sequence[str] | None = None,
) -> int:
    """Parses a command line and runs the command.

    Args:
      command: What it understands.
      run: Called with the values of the flags, and the arguments passed on.
      arguments: The command line without the program's name; None takes the real one.
    Returns:
      The exit code: 0, EXIT_DIVERGED or EXIT_BAD_INPUT, after one line on the error
      output for the latter two.
    Example:
      >>> command = Command('greet', 'Greets.', (Flag('name', 'world', 'Whom.'),))
      >>> greet = lambda values, rest: print(f'hello {values.name}')
      >>> run_command(command, greet, ['--name=there'])
      hello there
      0
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if "--help" in arguments or "-h" in arguments:
        sys.stdout.write(help_text(command))
        return 0
    try:
        run(*_parse(command, arguments))
    except TrainingDivergedError as error:
        return _fail(error, EXIT_DIVERGED)
    except (UserError, flags.Error) as error:
        return _fail(error, EXIT_BAD_INPUT)
    return 0


def call_in_file(file: str | Path, flag: str, function: str, *arguments: Any) -> Any:
    """Calls a function of a Python file that a flag names.

    Args:
      file: Its path; it may import its neighbours.
      flag: Without dashes, for messages.
      function: Name of a function of the file.
      *arguments: For it.
    Returns:
      What it returns.
    Raises:
      UserError: The file does not exist, cannot be run, or has no such function.
    """
    path = Path(file)
    if not path.is_file():
        raise UserError(f"--{flag}={file} is not a file; configs/ has examples")
    spec = importlib.util.spec_from_file_location(f"prunex_jax_{flag}", path)
    if spec is None or spec.loader is None:
        raise UserError(f"--{flag}={file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
        return getattr(module, function)(*arguments)
    except UserError:
        raise
    except Exception as error:
        what = " ".join(str(error).split())
        raise UserError(
            f"--{flag}={file} cannot be loaded: {type(error).__name__}: {what}"
        ) from error
    finally:
        sys.path.remove(str(path.parent))


def split_list(text: str) -> tuple[str, ...]:
    """Parts of a flag that takes several values.

    Example:
      >>> split_list('dense, hsadmm,')
      ('dense', 'hsadmm')
    """
    return tuple(part.strip() for part in text.split(",") if part.strip())


def check_name(name: str) -> None:
    """Refuses what cannot be the name of a row, which is a folder and a flag's value.

    Raises:
      UserError: It has something else than letters, digits and dashes.
    """
    if not re.fullmatch(r"[A-Za-z0-9-]+", name):
        raise UserError(f"name {name!r} may have letters, digits and dashes only")


def take_rows(
    rows: Sequence[NamedT], asked: Sequence[str], of: str
) -> tuple[NamedT, ...]:
    """Takes rows by name, in the order asked for; all if none is.

    Args:
      rows: Of a study or a sweep.
      asked: Names.
      of: What they are rows of, for the message.
    Raises:
      UserError: There is no such row.
    """
    known = {row.name: row for row in rows}
    for name in asked:
        if name not in known:
            raise UserError(
                f"row {name!r} is not in {of}{suggest(name, known)} "
                f"(there are {', '.join(known)})"
            )
    return tuple(known[name] for name in asked) or tuple(rows)


def help_text(command: Command) -> str:
    """What `--help` prints: the command's own text, then its flags.

    Example:
      >>> command = Command('greet', 'Greets.', (Flag('name', 'world', 'Whom.'),))
      >>> print(help_text(command))
      Greets.
      <BLANKLINE>
      flags:
        --name          Whom. Default: world.
      <BLANKLINE>
    """
    lines = [command.text.strip(), "", "flags:"]
    for flag in command.flags:
        text = flag.text
        if flag.choices:
            text += f" One of: {', '.join(flag.choices)}."
        if flag.is_required:
            text += " Required."
        elif flag.default not in ("", False):
            text += f" Default: {flag.default}."
        lines += textwrap.wrap(
            text,
            width=88,
            initial_indent=f"  --{flag.name:<13} ",
            subsequent_indent=" " * 18,
        )
    return "\n".join(lines) + "\n"


def _parse(command: Command, arguments: Sequence[str]) -> tuple[Values, list[str]]:
    """Splits the command line into values of flags and what is passed on."""
    passed: list[str] = []
    own: list[str] = []
    for argument in arguments:
        (passed if command.passes_on(argument) else own).append(argument)
    values = flags.FlagValues()
    for flag in command.flags:
        _define(flag, values)
    rest = values([command.name, *own])[1:]
    if rest:
        raise UserError(f"argument {rest[0]!r} is not understood; {command.hint}")
    for flag in command.flags:
        if flag.is_required and not values[flag.name].value:
            raise UserError(f"--{flag.name} is required; --help shows the command line")
    return values, passed


def _define(flag: Flag, values: Values) -> None:
    name, default, text = flag.name, flag.default, flag.text
    if flag.choices:
        flags.DEFINE_enum(name, str(default), flag.choices, text, flag_values=values)
    elif isinstance(default, bool):
        flags.DEFINE_bool(name, default, text, flag_values=values)
    elif isinstance(default, int):
        flags.DEFINE_integer(name, default, text, flag_values=values)
    else:
        flags.DEFINE_string(name, default, text, flag_values=values)


def _fail(error: Exception, code: int) -> int:
    sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
    return code
