"""A figure of the losses of groups of tokens under several models."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from mogrifier_jax.analysis import documents, figures, token_losses

if TYPE_CHECKING:
    from matplotlib import figure as matplotlib_figure


def draw_losses(
    losses: Mapping[str, documents.Rows], x_label: str, title: str = ""
) -> "matplotlib_figure.Figure":
    """Draws mean losses by group, and how much they differ from the losses of the last model.

    The error bars are standard errors of independent means. They are wider than they should be,
    because the models are scored on the same tokens and tend to err at the same ones.
    """
    fig, panels = figures.make_panels(1, 2, width=4.2, height=3.0)
    left, right = panels[0]
    fig.suptitle(title)
    *others, last = losses
    labels = [token_losses.label_group(row, "> ", "–") for row in losses[last]]
    xs = np.arange(len(labels))
    for name, rows in losses.items():
        left.plot(
            xs, [row["nats"] for row in rows], "o-", color=figures.colour_of(name), label=name
        )
    for name in others:
        pairs = list(zip(losses[name], losses[last], strict=True))
        gaps = [a["nats"] - b["nats"] for a, b in pairs]
        errors = [np.hypot(a["error"], b["error"]) for a, b in pairs]
        right.errorbar(xs, gaps, yerr=errors, fmt="o", color=figures.colour_of(name), capsize=3)
    right.axhline(0, color="0.7", linewidth=0.8)
    left.set_ylabel("nats per token")
    right.set_ylabel(f"{', '.join(others)} minus {last}, nats")
    for axes in (left, right):
        axes.set_xticks(xs, labels, rotation=30, ha="right", fontsize=8)
        axes.set_xlabel(x_label)
    figures.add_legend(left)
    return fig
