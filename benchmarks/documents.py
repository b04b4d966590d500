"""Tables and numbers of the documents, from saved records.

What stands between ``<!-- NAME -->`` and ``<!-- /NAME -->`` in a document is replaced, where a
benchmark has a text of that name. A table gets lines of its own, a number stays in its sentence:
there, a mark must not begin a line, or Markdown ends the paragraph.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Mapping

from . import record

ROOT = Path(__file__).parents[1]
DOCUMENTS = ("*.md", "benchmarks/*.md", "notebooks/**/*.md")


def write(folder: Path, benchmarks: Mapping[str, Any], root: Path = ROOT) -> list[Path]:
    """Write what the records of a folder say into all documents; the files that were written."""
    texts: dict[str, str] = {}
    for name, benchmark in benchmarks.items():
        runs = record.load(name, folder)
        if runs:
            texts.update(benchmark.tables(runs))
    written = []
    for path in sorted(path for pattern in DOCUMENTS for path in root.glob(pattern)):
        before = path.read_text()
        after = filled(before, texts)
        if after != before:
            path.write_text(after)
            written.append(path)
    return written


def filled(document: str, texts: Mapping[str, str]) -> str:
    """Replace what stands between the marks of each text."""
    for name, text in texts.items():
        marks = re.compile(f"(<!-- {re.escape(name)} -->).*?(<!-- /{re.escape(name)} -->)", re.S)
        inside = f"\n{text}\n" if "\n" in text else text
        document = marks.sub(lambda found, inside=inside: found[1] + inside + found[2], document)
    return document
