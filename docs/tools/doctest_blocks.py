"""Renders docstring examples as code blocks. Without this, Markdown would render their `>>>` as quotations."""

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"(^>>> .*(?:\n.+)*)", re.MULTILINE)  # up to the next empty line


class DoctestBlocks(griffe.Extension):
    """Puts a code fence around every docstring example."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Adds the fences to one docstring; griffe calls this for every object."""
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(r"```pycon\n\1\n```", obj.docstring.value)
