"""What the command lines of the package share: flags, help, errors, exit codes.

It owns absl's flags. A command is described as data, so that all of them refuse unknown
flags, stray arguments and bad values alike: in one line, with exit code 2 and without a
traceback. It leaves to each command what is done.
"""

import dataclasses
import sys
import textwrap
from collections.abc import Callable, Sequence

from absl import flags

from prunex_jax.errors import TrainingDivergedError, UserError

# Values of the flags of a command, as attributes.
Values = flags.FlagValues
EXIT_DIVERGED = 1
EXIT_BAD_INPUT = 2


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
