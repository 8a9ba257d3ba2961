"""Where the verbs print: results to standard output, chatter to standard error, both through rich."""

from typing import Any

from headwise.extras import need


def console(*, chatter: bool = False) -> Any:
    """A `rich.console.Console`. Without a terminal it prints plain text, 100 columns wide."""
    rich = need("rich.console", "terminal", "tables in the terminal")
    made = rich.Console(stderr=chatter, highlight=False)
    return made if made.is_terminal else rich.Console(stderr=chatter, highlight=False, width=100)
