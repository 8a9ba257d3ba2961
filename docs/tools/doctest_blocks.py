"""Shows the examples of docstrings as code: Markdown would take their `>>>` for quotations."""

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"(^>>> .*(?:\n.+)*)", re.MULTILINE)  # up to the next empty line


class DoctestBlocks(griffe.Extension):
    """Puts a fence around every example."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for everything that may have a docstring."""
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(r"```pycon\n\1\n```", obj.docstring.value)
