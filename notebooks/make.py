"""Makes the notebooks from their Python files, runs them, and keeps their outputs.

    python notebooks/make.py                 # all of them
    python notebooks/make.py quickstart      # one
    python notebooks/make.py --badges        # only renews the links to Colab, in seconds

A file is cut at lines `# %%` (code) and `# %% [markdown]` (text, every line a comment). With
MOGRIFIER_QUICK=1 the notebooks train for seconds only; MOGRIFIER_RUNS is the folder of the runs.
A notebook begins with a link that opens it in Colab if setup.cfg names a repository on GitHub.
"""

import configparser
import pathlib
import re
import sys

import nbclient
import nbformat

FOLDER = pathlib.Path(__file__).parent
NAMES = ("quickstart", "gating_statistics", "results")
COLAB = "https://colab.research.google.com"


def read_cells(text: str) -> list[nbformat.NotebookNode]:
    """The cells of a Python file."""
    cells = []
    for part in re.split(r"^# %%", text, flags=re.MULTILINE)[1:]:
        kind, _, body = part.partition("\n")
        if kind.strip() == "[markdown]":
            lines = [re.sub(r"^# ?", "", line) for line in body.strip().splitlines()]
            cell = nbformat.v4.new_markdown_cell("\n".join(lines))
        else:
            cell = nbformat.v4.new_code_cell(body.strip())
        cell["id"] = f"cell{len(cells)}"  # The same each time, so that versions can be compared.
        cells.append(cell)
    return cells


def find_repository() -> str | None:
    """The owner and name of the project on GitHub, if setup.cfg has such a URL."""
    setup = configparser.ConfigParser(interpolation=None)
    setup.read(FOLDER.parent / "setup.cfg")
    urls = " ".join(setup["metadata"].get(key, "") for key in ("url", "project_urls"))
    match = re.search(r"https://github\.com/([\w.-]+/[\w.-]+)", urls)
    return match[1].removesuffix(".git") if match else None


def make_badge(name: str, repository: str) -> str:
    """A picture that links to a notebook in Colab."""
    page = f"{COLAB}/github/{repository}/blob/main/notebooks/{name}.ipynb"
    return f"[![Open in Colab]({COLAB}/assets/colab-badge.svg)]({page})"


def make_notebook(name: str) -> nbformat.NotebookNode:
    """The notebook of a file, without outputs."""
    notebook = nbformat.v4.new_notebook(cells=read_cells((FOLDER / f"{name}.py").read_text()))
    if repository := find_repository():
        title, _, rest = notebook.cells[0].source.partition("\n")
        notebook.cells[0].source = f"{title}\n\n{make_badge(name, repository)}\n{rest}"
    notebook.metadata["kernelspec"] = {
        "display_name": "Python 3",
        "language": "python",
        "name": "python3",
    }
    return notebook


def renew_badge(name: str) -> None:
    """Replaces the first cell of a notebook and keeps everything else, outputs included."""
    path = FOLDER / f"{name}.ipynb"
    notebook = nbformat.read(path, as_version=4)
    notebook.cells[0].source = make_notebook(name).cells[0].source
    nbformat.write(notebook, path)


def execute(notebook: nbformat.NotebookNode, timeout: int = 3600) -> None:
    """Runs all cells; one that fails raises, with its traceback."""
    resources = {"metadata": {"path": str(FOLDER)}}
    nbclient.NotebookClient(notebook, timeout=timeout, resources=resources).execute()
    for cell in notebook.cells:
        cell.metadata.clear()  # Times of day.


def main(names: list[str]) -> None:
    """Makes these notebooks."""
    if names == ["--badges"]:
        for name in NAMES:
            renew_badge(name)
        return
    for name in names or NAMES:
        notebook = make_notebook(name)
        execute(notebook)
        path = FOLDER / f"{name}.ipynb"
        nbformat.write(notebook, path)
        print(f"{path.name}: {path.stat().st_size / 1024:.0f} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
