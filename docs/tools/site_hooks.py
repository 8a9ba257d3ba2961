"""Adds documents from outside docs/ to the site, and adapts links that leave the site.

People also read these pages in the repository, where they link to source files. The site does not contain source files,
so such a link is replaced by its text.
"""

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
ELSEWHERE = {"card.md": "src/headwise/models/CARD.md", "changelog.md": "CHANGELOG.md"}
LINK = re.compile(r"(!?)\[([^\]]*)\]\((\.\.?/[^)\s]+)\)")


def on_files(files: Any, config: Any) -> Any:
    """Adds the documents from outside docs/."""
    for page, path in ELSEWHERE.items():
        files.append(File.generated(config, page, content=(ROOT / path).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """The page's Markdown, with links out of docs/ replaced by links within the site or by their text."""
    name = page.file.src_uri
    folder = (ROOT / ELSEWHERE.get(name, f"docs/{name}")).parent
    return LINK.sub(lambda found: _link(*found.groups(), folder), markdown)


def _link(image: str, words: str, target: str, folder: Path) -> str:
    path, _, anchor = target.partition("#")
    found = Path(os.path.normpath(folder / path))
    if not found.exists():
        raise FileNotFoundError(f"[{words}]({target}): {found.relative_to(ROOT)} does not exist")
    place = found.relative_to(ROOT).as_posix()
    inside = {path: page for page, path in ELSEWHERE.items()}.get(place)
    if inside is None and place.startswith("docs/"):
        inside = place.removeprefix("docs/")
    return words if inside is None else f"{image}[{words}]({inside}{'#' * bool(anchor)}{anchor})"
