import pytest

from mogrifier_jax.analysis import sweep_figures
from mogrifier_jax.configs import Row, Set
from tests.analysis.sweep_rows import make_rows


def test_figures_show_every_row_and_the_paper_beside():
    rows = make_rows(
        {"LSTM": [5.0, 5.2], "Mogrifier": [4.9, 4.8]}, paper={"LSTM": 4.0, "Mogrifier": 3.9}
    )
    fig = sweep_figures.draw_scores(Set("Both", [Row("a", "LSTM"), Row("b", "Mogrifier")]), rows)
    for axes in fig.axes:
        assert [t.get_text() for t in axes.get_yticklabels()] == ["LSTM", "Mogrifier"]
    assert fig.axes[0].get_title() == "measured: 2M parameters, 2 seeds"
    assert fig.axes[1].get_title() == "paper"
    assert fig.get_suptitle() == "Both"
    places = {"LSTM": 0, "Mogrifier": 5}
    rows = make_rows({"LSTM": [5.0], "Mogrifier": [4.9]}, x=places)
    fig = sweep_figures.draw_scores(Set("Curves", [], x_label="rounds"), rows)
    (axes,) = fig.axes
    assert axes.get_title() == "Curves\nmeasured: 2M parameters, 1 seed" and not fig.get_suptitle()
    assert axes.get_xlabel() == "rounds" and axes.get_xticks().tolist() == [0, 5]
    rows = make_rows({"LSTM": [5.0], "Mogrifier": [4.9]}, x={"LSTM": "tied", "Mogrifier": "tied"})
    (axes,) = sweep_figures.draw_scores(Set("Words", [], x_label=""), rows).axes
    assert [t.get_text() for t in axes.get_xticklabels()] == ["tied"]


def test_learning_curves_leave_out_what_comes_before_training():
    curves = {"LSTM": [[(0, 9.0), (10, 5.0), (20, 4.0)]] * 2, "Mogrifier": [[(0, 9.0), (10, 3.0)]]}
    rows = make_rows({"LSTM": [4.0, 4.0], "Mogrifier": [3.0]}, curves=curves)
    (axes,) = sweep_figures.draw_learning_curves(rows, "Title").axes
    assert [line.get_ydata().tolist() for line in axes.lines] == [[5.0, 4.0], [5.0, 4.0], [3.0]]
    millions = [n * 16 * 35 / 1e6 for n in (10, 20)]
    assert axes.lines[0].get_xdata().tolist() == pytest.approx(millions)
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["LSTM", "Mogrifier"] and axes.get_title() == "Title"


def test_learning_curves_of_different_models_have_different_colours():
    from matplotlib import colors

    labels = ["Mogrifier", "Mogrifier RLSTM", "Chrono initialisation", "Rectified Adam"]
    curves = {label: [[(0, 5.0), (10, 4.0)]] for label in labels}
    rows = make_rows({label: [4.0] for label in labels}, curves=curves)
    (axes,) = sweep_figures.draw_learning_curves(rows).axes
    assert len({colors.to_hex(line.get_color()) for line in axes.get_lines()}) == len(labels)
