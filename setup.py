"""What setup.cfg cannot say: experiments inside the package, and links for a package index.

README has relative links, which a package index does not know. PROJECT_URL is the address of the
repository, and then links lead to the files of this version there. Without it they become text.
"""

import os
import pathlib
import re

import setuptools

ROOT = pathlib.Path(__file__).parent
URL = os.environ.get("PROJECT_URL", "").rstrip("/")
DOCS_URL = os.environ.get("DOCS_URL", "")
(VERSION,) = re.findall(
    r'^__version__ = "(.+)"$', (ROOT / "mogrifier_jax" / "__init__.py").read_text(), re.M
)


def describe() -> str:
    """README with links that work anywhere."""

    def replace(match):
        mark, text, target = match.groups()
        if re.match("https?:|#", target):
            return match[0]
        kind = "raw" if mark else "blob"
        link = f"{mark}[{text}]({URL}/{kind}/v{VERSION}/{target})"
        return link if URL else "" if mark else text

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.sub(r"(!?)\[([^\]]*)\]\(([^)]+)\)", replace, readme)


def project_urls() -> dict[str, str]:
    """Addresses beside the description."""
    if not URL:
        return {"Paper": "https://arxiv.org/abs/1909.01792"}
    return {
        "Source": URL,
        "Issues": f"{URL}/issues",
        "Changelog": f"{URL}/blob/v{VERSION}/CHANGELOG.md",
        "Documentation": DOCS_URL or f"{URL}/blob/v{VERSION}/docs/index.md",
        "Paper": "https://arxiv.org/abs/1909.01792",
    }


# Folders of files that are not modules; setuptools wants them to be listed.
FOLDERS = ("data.pydoc", "evaluation.shipped", "experiments", "experiments.studies")

setuptools.setup(
    long_description=describe(),
    project_urls=project_urls(),
    packages=[
        *setuptools.find_packages(include=["mogrifier_jax*"]),
        *(f"mogrifier_jax.{folder}" for folder in FOLDERS),
    ],
    package_dir={"mogrifier_jax.experiments": "experiments"},
)
