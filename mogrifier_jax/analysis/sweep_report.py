"""Writes the tables and figures that compare the runs of a sweep.

For each set these are `<set>.json` (the rows of `sweep_results.collect`), `<set>.md` (the table),
`<set>.png` (the scores) and `<set>_curves.png` (learning curves), all in the workdir of the sweep.
"""

import os
import pathlib
import re
import shutil
from collections.abc import Sequence

from absl import logging

from mogrifier_jax import configs
from mogrifier_jax.analysis import documents, sweep_figures, sweep_results, sweep_tables
from mogrifier_jax.training import atomic_files, learning_curves, summaries, workdirs


def write(
    workdir: str | os.PathLike,
    name: str,
    variants: configs.Set,
    seeds: Sequence[int],
    title: str | None = None,
) -> list[pathlib.Path]:
    """Writes the files of a set, and returns their paths; without a finished run there are none.

    Args:
      name: the name of the set, with which the names of the files begin.
      title: the title of tables and figures; by default the title of the set.
    """
    folders = {
        row.variant: [sweep_results.run_folder(workdir, row.variant, seed) for seed in seeds]
        for row in variants.rows
    }
    rows = sweep_results.collect(variants, folders)
    if not rows:
        return []
    title = title or variants.title
    endings = (".json", ".md", ".png", "_curves.png")
    numbers, table, scores, curves = (pathlib.Path(workdir) / f"{name}{end}" for end in endings)
    workdirs.write_json(workdir, numbers.name, rows)
    atomic_files.replace_text(table, sweep_tables.to_markdown(title, rows, variants.x_label))
    try:
        learning_curves.save_figure(sweep_figures.draw_scores(variants, rows, title), scores)
        learning_curves.save_figure(sweep_figures.draw_learning_curves(rows, title), curves)
    except ImportError:
        logging.info("no pictures of %s, because matplotlib is not installed", name)
        return [numbers, table]
    return [numbers, table, scores, curves]


def show(paths: Sequence[pathlib.Path]) -> str:
    """The tables among these files as a terminal shows them, and then the paths of all files."""
    shown = []
    for path in paths:
        if path.suffix == ".md":
            # Markdown separates the title, the table, the differences and the rest by empty lines.
            text = path.read_text(encoding="utf-8").strip().replace("**", "")
            shown += [
                documents.align_table(part) if part.startswith("|") else part
                for part in text.split("\n\n")
            ]
    saved = summaries.table({"saved": [(path.name, str(path)) for path in paths]})
    return "\n\n".join([*shown, saved])


def insert_table(document: str | os.PathLike, name: str, made: pathlib.Path) -> None:
    """Replaces the table of a set in a document, and copies JSON and pictures to docs/results.

    Args:
      made: the path of the files of the set, without their endings.
    """
    document = pathlib.Path(document)
    results = document.parent / "docs" / "results"
    results.mkdir(parents=True, exist_ok=True)
    table = made.with_suffix(".md").read_text(encoding="utf-8")
    for ending, caption in ((".json", ""), (".png", name), ("_curves.png", f"{name}, curves")):
        source, target = pathlib.Path(f"{made}{ending}"), re.sub(r"\W+", "_", name) + ending
        if source.exists():
            shutil.copyfile(source, results / target)
            table += f"\n![{caption}](docs/results/{target})\n" if caption else ""
    documents.replace_section(document, f"sweep {name}", table)
