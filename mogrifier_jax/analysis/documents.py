"""Markdown tables, and the sections of a Markdown document that `--report` replaces.

A document such as RESULTS.md has sections like

    <!-- sweep ablation:small rounds -->
    <!-- end -->

and `--report` replaces what is between the two comments.
"""

import pathlib
import re
from collections.abc import Sequence

from mogrifier_jax import files
from mogrifier_jax.evaluation import paper_tables
from mogrifier_jax.training import atomic_files

Rows = Sequence[files.JsonObject]  # Of a table, by the names of its columns.


def make_table(head: Sequence[str], lines: Sequence[Sequence[object]]) -> str:
    """A table in Markdown; all columns but the first are right-aligned, floats have four digits."""
    rows = [[f"{c:.4g}" if isinstance(c, float) else str(c) for c in line] for line in lines]
    return paper_tables.markdown_table(head, rows, right=range(1, len(head)))


def replace_section(report: pathlib.Path, name: str, content: str) -> None:
    """Replaces the section of this name, or adds it at the end if the document has none."""
    section = f"<!-- {name} -->\n{content}<!-- end -->"
    pattern = re.compile(rf"<!-- {re.escape(name)} -->.*?<!-- end -->", re.DOTALL)
    with atomic_files.locked(report.parent):
        text = files.read_text(report, "give another document") if report.is_file() else ""
        if pattern.search(text):
            text = pattern.sub(lambda _: section, text)
        else:
            text += f"{section}\n"
        atomic_files.write_output(report, text)


def align_table(table: str) -> str:
    """The same table with its columns padded to equal widths, for a terminal."""
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rule = rows[1]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if mark.endswith(":") else cell.ljust(width)
            for cell, mark, width in zip(row, rule, widths, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    lines[1] = "  ".join("─" * width for width in widths)
    return "\n".join(lines)
