"""Notebooks: what is committed is made from the Python files, has outputs, and runs."""

import importlib.util
import pathlib

import nbformat
import pytest

from mogrifier_jax.analysis import inspection

FOLDER = pathlib.Path(__file__).parents[1] / "notebooks"
SPEC = importlib.util.spec_from_file_location("make_notebooks", FOLDER / "make.py")
make = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(make)


def sources(notebook):
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def test_every_file_is_a_notebook():
    files = {path.stem for path in FOLDER.glob("*.py")} - {"make"}
    assert files == set(make.NAMES) == {path.stem for path in FOLDER.glob("*.ipynb")}


@pytest.mark.parametrize("name", make.NAMES)
def test_committed_notebooks_are_made_from_their_files(name):
    path = FOLDER / f"{name}.ipynb"
    committed = nbformat.read(path, as_version=4)
    wanted = sources(make.make_notebook(name))
    assert sources(committed)[1:] == wanted[1:]
    assert sources(committed)[0] == wanted[0], "python notebooks/make.py --badges renews the links"
    assert path.stat().st_size < 1_000_000
    nbformat.validate(committed)
    outputs = [output for cell in committed.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not any(output.output_type == "error" for output in outputs)


def test_a_badge_opens_the_notebook_in_colab(monkeypatch, tmp_path):
    (tmp_path / "notebooks").mkdir()
    source = "# %% [markdown]\n# # Title\n#\n# text\n"
    (tmp_path / "notebooks" / "some.py").write_text(source)
    monkeypatch.setattr(make, "FOLDER", tmp_path / "notebooks")
    setup = tmp_path / "setup.cfg"
    setup.write_text("[metadata]\nname = some\n")
    assert make.make_notebook("some").cells[0].source == "# Title\n\ntext"  # No URL, no badge.
    setup.write_text("[metadata]\nproject_urls =\n    Source = https://github.com/me/some\n")
    first = make.make_notebook("some").cells[0].source
    page = "https://colab.research.google.com/github/me/some/blob/main/notebooks/some.ipynb"
    assert first.startswith("# Title\n\n[![Open in Colab](") and f"]({page})" in first
    assert first.endswith("\n\ntext")


def test_cells_are_cut_where_the_file_says():
    cells = make.read_cells(
        "# %% [markdown]\n# # Title\n#\n# text\n\n# %%\nx = 1  # %% no\n\n\ny = 2\n"
    )
    assert [(cell.cell_type, cell.source) for cell in cells] == [
        ("markdown", "# Title\n\ntext"),
        ("code", "x = 1  # %% no\n\n\ny = 2"),
    ]


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Seconds of training, on one device; what one notebook has trained the next one loads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOGRIFIER_QUICK", "1")
        runs = tmp_path_factory.mktemp("runs")
        patch.setenv("MOGRIFIER_RUNS", str(runs))
        patch.setenv("PYTHONPATH", str(FOLDER.parent))  # Installed or not.
        patch.setenv("JAX_NUM_CPU_DEVICES", "1")
        yield runs


# Between notebooks: names are forgotten, imports are not.
FORGET = """
%reset -f
"""


@pytest.mark.slow
@pytest.mark.usefixtures("environment")
def test_notebooks_run():
    """One after the other in one process."""
    cells = []
    for name in make.NAMES:
        forget = nbformat.v4.new_code_cell(FORGET.strip())
        cells += [forget, *make.make_notebook(name).cells]
    for number, cell in enumerate(cells):
        cell["id"] = f"cell{number}"
    notebook = nbformat.v4.new_notebook(cells=cells)
    make.execute(notebook)
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code")


@pytest.mark.slow
def test_what_they_have_trained_can_be_inspected(environment, capsys):
    """After the notebooks, or else there is nothing yet."""
    folders = sorted(str(folder) for folder in environment.glob("pydoc*"))
    if not folders:
        pytest.skip("the notebooks were not run")
    found = inspection.inspect(folders, max_windows=2)
    assert set(found) == {"gates", "rounds", "frequency", "position", "recovery"}
    assert set(found["gates"]) == {"LSTM", "Mogrifier"} and not found["rounds"]["LSTM"]
    means = [[row["mean"] for row in found["gates"][name]] for name in ("LSTM", "Mogrifier")]
    assert len(means[0]) == 6 and means[0] != means[1]
    assert "| layer, gate | model | mean |" in capsys.readouterr().out


@pytest.mark.slow
def test_a_cell_that_fails_is_an_error():
    notebook = nbformat.v4.new_notebook(cells=make.read_cells("# %%\nraise ValueError('no')\n"))
    with pytest.raises(make.nbclient.exceptions.CellExecutionError, match="ValueError"):
        make.execute(notebook)
