"""How the command line is read. Whoever mistypes is told the usage of that command and the nearest name.

Names are compared with those the parser really has: options and choices here, commands in `headwise.cli`.
"""

import argparse
import re
import sys
import textwrap
from collections.abc import Sequence
from typing import Any, NoReturn

from headwise.cli.console import say
from headwise.errors import nearest, suggestion

OPTION = re.compile(r"--?[A-Za-z][^\s=]*")
LARGEST = 2**63 - 1  # of the whole numbers that torch takes
NUMBERS = {int: "a whole number", float: "a number"}


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Fills paragraphs, leaves indented examples as they are written, and adds each option's default to its help."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines = text.splitlines(keepends=True)
        return "".join(line if line.startswith(" ") else f"{textwrap.fill(line, width)}\n" for line in lines)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is False or action.default in (None, argparse.SUPPRESS, []):
            return action.help
        return f"{action.help} (default: {action.default})"


class Parser(argparse.ArgumentParser):
    """A parser of one command, whose errors show the usage of that command and the nearest name."""

    given: Sequence[str] = ()

    def read(self, arguments: Sequence[str]) -> argparse.Namespace:
        """The options, which may stand before, between and after other arguments; exits if something is wrong."""
        self.given = arguments
        return self.parse_args(arguments) if "--" in arguments else self.parse_intermixed_args(arguments)

    def error(self, message: str) -> NoReturn:
        """Exit with the usage and what is wrong: an option that does not exist explains other errors."""
        unknown, left = self._unknown_option(), message.removeprefix("unrecognized arguments: ")
        if unknown is not None:
            near = nearest(unknown.lstrip("-"), [option.lstrip("-") for option in self._option_string_actions])
            cure = f"{self.prog} --help explains those above." if near is None else f"Did you mean --{near}?"
            message = f"there is no option {unknown}. {cure}"
        elif left != message:
            message = f"unexpected argument {left!r}.{self._quotes()}"
        self.print_usage(sys.stderr)
        say(f"{self.prog}: {message}")
        self.exit(2)

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """End the program, after the help has been written: a closed pipe is noticed here."""
        sys.stdout.flush()
        super().exit(status, message)

    def flags(self) -> list[str]:
        """The options that need no value, without their dashes."""
        actions = [action for action in self._actions if action.nargs in (0, "?") and action.dest != "help"]
        return [option.lstrip("-") for action in actions for option in action.option_strings]

    def _unknown_option(self) -> str | None:
        """The first option given that does not exist; the beginning of a name is enough."""
        ends = self.given.index("--") if "--" in self.given else len(self.given)
        names = (found[0] for word in self.given[:ends] if " " not in word and (found := OPTION.match(word)))
        return next((name for name in names if not self._begins(name)), None)

    def _begins(self, name: str) -> bool:
        return any(option.startswith(name) for option in self._option_string_actions)

    def _quotes(self) -> str:
        """What to do about a text that the shell has split into words."""
        takes_text = any(action.dest == "text" for action in self._actions)
        return ' Put a text in quotes: "The quick brown fox".' if takes_text else ""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(action, f"there is no {value!r}.{suggestion(str(value), action.choices)}")

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        try:
            value = super()._get_value(action, arg_string)
        except argparse.ArgumentError:
            expected = NUMBERS.get(action.type)  # type: ignore[call-overload]
            if expected is None:
                raise
            raise argparse.ArgumentError(action, f"{arg_string!r} is not {expected}.") from None
        if isinstance(value, int) and abs(value) > LARGEST:
            raise argparse.ArgumentError(action, f"{arg_string} is too large; expected at most {LARGEST:,}.")
        return value
