"""Documents from files: plain text, JSONL and Parquet, and texts in memory.

`document` is a text and how it is cut into passages, `sources` what all kinds of files have in common, `text`, `lines`
and `table` are the kinds, and `long_json` reads a long line without holding it.
"""

from headwise.study.survey.documents.document import Document, LongText, passages
from headwise.study.survey.documents.lines import LinesFile
from headwise.study.survey.documents.sources import DocumentSource, MissingSource, TextList
from headwise.study.survey.documents.table import TableFile
from headwise.study.survey.documents.text import TextFile

__all__ = [
    "Document", "DocumentSource", "LinesFile", "LongText", "MissingSource", "TableFile", "TextFile", "TextList",
    "passages",
]  # fmt: skip
