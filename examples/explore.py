r"""What a trained model does as it reads a text: the page of `model.explore`, and a picture of it.

    python examples/explore.py runs/pydoc explore.png "The lambda form creates a function."

Needs Chromium or Chrome, and Pillow, which comes with matplotlib. Runs that are named
after the text are shown against the first.
"""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

from PIL import Image

import mogrifier_jax

# What the page opens with; tokens count from 1.
VIEW = "theme=light&map=x_scale&contrast=change&order=pattern&token=28&pin=24"
WIDTH, HEIGHT, SCALE = 1340, 900, 1.5


def main(workdir, path, text, *others):
    """Makes the page and takes a picture of it."""
    model, *rest = (mogrifier_jax.load(folder) for folder in (workdir, *others))
    with tempfile.TemporaryDirectory() as folder:
        page = model.explore(text, *rest).save(pathlib.Path(folder) / "explore.html")
        photograph(f"{page.as_uri()}#{VIEW}", path, folder)


def photograph(address, path, profile):
    """A PNG of a page, with few colours, so that it is small."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("there is no chromium on the PATH; install it, or open the page by hand")
    command = [browser, "--headless", "--disable-gpu", "--hide-scrollbars", f"--screenshot={path}"]
    command += [f"--window-size={WIDTH},{HEIGHT}", f"--force-device-scale-factor={SCALE}"]
    command += [f"--user-data-dir={profile}/profile", "--virtual-time-budget=5000"]
    if os.geteuid() == 0:
        command.append("--no-sandbox")  # Chromium refuses its sandbox to root.
    subprocess.run([*command, address], check=True, capture_output=True)
    Image.open(path).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(
        path, optimize=True
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
