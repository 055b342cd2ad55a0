r"""What the gates of a trained model do to a text, as a picture.

    python examples/gates.py runs/pydoc gates.png "The lambda form creates a function."

Each column is a token, each row a unit of the first layer's input; blue is scaled down by the
rounds that gate x, red is scaled up. Needs matplotlib.
"""

import math
import sys

import mogrifier_jax
from mogrifier_jax.analysis import gate_plots


def main(workdir, path, text):
    """Draws the scales of the first layer's input into a PNG."""
    found = mogrifier_jax.load(workdir).gates(text)
    scale = math.prod(found.layers[0]["rounds"][::2])  # Odd rounds gate x.
    figure = gate_plots.draw_heat_map(found.tokens, scale)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main(*sys.argv[1:])
