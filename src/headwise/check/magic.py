"""`%%headwise_check` in a notebook: runs the cell as always, then judges what it defines."""

import ast
from typing import Any

from headwise.check.asking import check


def load(shell: Any) -> None:
    """Register the magic with a notebook's shell."""
    shell.register_magic_function(lambda line, cell: judge_cell(shell, line, cell), "cell", "headwise_check")


def judge_cell(shell: Any, line: str, cell: str) -> None:
    """Run the cell, then print a report of the class named in the line, or of the last class it defines."""
    shell.run_cell(cell)
    name = line.strip() or last_class(cell)
    if name is None or name not in shell.user_ns:
        print("%%headwise_check: this cell defines no class; name one, as in %%headwise_check MyAttention")
        return
    print(check(shell.user_ns[name]))


def last_class(cell: str) -> str | None:
    """The class to judge unless one is named: the last that mentions attention or heads, else the last."""
    try:
        found = [node.name for node in ast.parse(cell).body if isinstance(node, ast.ClassDef)]
    except SyntaxError:  # the notebook has shown it
        return None
    telling = [name for name in found if "att" in name.lower() or "head" in name.lower()]
    return (telling or found)[-1] if found else None
