"""The style that all figures of the analysis share: colours of models, panels and legends.

Figures are made without pyplot, which keeps them open and may show windows.
"""

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib import axes as matplotlib_axes
    from matplotlib import figure as matplotlib_figure

COLOURS = {"LSTM": "tab:orange", "Mogrifier": "tab:blue", "Mogrifier RLSTM": "tab:green"}


def make_panels(
    rows: int, columns: int, width: float, height: float
) -> "tuple[matplotlib_figure.Figure, np.ndarray]":
    """A figure and its axes [rows, columns], each of which has this size in inches."""
    from matplotlib import figure

    fig = figure.Figure(figsize=(width * columns, height * rows), layout="constrained")
    axes = fig.subplots(rows, columns, squeeze=False)
    for each in axes.flat:
        each.spines[["top", "right"]].set_visible(False)
    return fig, axes


def colour_of(model: str) -> str:
    """The colour of a model, which is the same in all figures; grey if it has none."""
    return COLOURS.get(model, "0.4")


def add_legend(axes: "matplotlib_axes.Axes") -> None:
    """Adds a legend without a frame."""
    axes.legend(framealpha=0.9, edgecolor="none", fontsize=9)
