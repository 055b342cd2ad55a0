"""The documentation site: it builds without a warning, links hold, and a browser can search it.

Needs what `make docs` installs; without it, these tests are skipped.
"""

import html
import importlib
import pathlib
import re
import subprocess
import sys
import urllib.parse
import zlib

import pytest

import mogrifier_jax
from tests import browser as browsers

pytest.importorskip("sphinx", reason="make docs has not been run here")
pytest.importorskip("myst_nb")
pytest.importorskip("furo")

pytestmark = pytest.mark.slow
ROOT = pathlib.Path(__file__).parents[1]
TIME_LIMIT = 900  # Seconds; a build takes less than one minute of a core.
needs_browser = pytest.mark.skipif(
    not (browsers.BINARY and browsers.DRIVER), reason="chromium and chromedriver are not installed"
)


def build(folder, *options, source=ROOT):
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", f"{source}/docs"]
    command += ["-d", str(folder / "doctrees"), *options, str(source), str(folder / "site")]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIME_LIMIT)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("docs")
    done = build(folder)
    assert done.returncode == 0, done.stderr
    return folder / "site"


def test_a_broken_link_is_an_error(tmp_path):
    """With a page of its own, as the control of the fixture."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# Title\n\n[there](nowhere.md)\n")
    setting = "extensions = ['myst_nb']\nroot_doc = 'docs/index'\n"
    (tmp_path / "docs" / "conf.py").write_text(setting)
    done = build(tmp_path, source=tmp_path)
    assert done.returncode and "nowhere.md" in done.stderr


def listed_names(path):
    """Python's names in an inventory: four lines of text, then compressed lines "name kind ..."."""
    lines = zlib.decompress(path.read_bytes().split(b"\n", 4)[4]).decode().splitlines()
    return [line.split()[0] for line in lines if line.split()[1].startswith("py:")]


def test_every_public_name_is_in_the_reference(site):
    names = set(listed_names(site / "objects.inv"))
    public = {f"mogrifier_jax.{name}" for name in mogrifier_jax.__all__}
    public |= {f"mogrifier_jax.nnx.{name}" for name in mogrifier_jax.nnx.__all__}
    modules = {"mogrifier_jax.nnx", "mogrifier_jax.from_flax", "mogrifier_jax.from_pytorch"}
    assert public - modules <= names
    assert {"mogrifier_jax.TrainedModel.score", "mogrifier_jax.RNN.__call__"} <= names
    for module in (mogrifier_jax.from_flax, mogrifier_jax.from_pytorch):
        assert f"{module.__name__}.convert" in names
    assert "mogrifier_jax.MogrifierCell" not in names
    # Methods by which modules of the package use each other are not for the reader.
    assert "mogrifier_jax.LSTMCell.initialize_carry" in names
    assert "mogrifier_jax.LSTMCell.check_carry" not in names
    # Each name has a page with its docstring.
    for full in public - modules:
        module, _, name = full.rpartition(".")
        page = html.unescape((site / "docs" / "api" / f"{full}.html").read_text())
        docstring = getattr(importlib.import_module(module), name).__doc__
        word = max(re.findall(r"[A-Za-z]+", docstring.splitlines()[0]), key=len)
        assert word in page


def test_tables_of_notebooks_are_tables(site):
    for name in ("results", "gating_statistics"):
        page = (site / "notebooks" / f"{name}.html").read_text()
        assert "<table" in page and "<p>|" not in page


def links(text):
    for target in re.findall(r"<a [^>]*href=\"([^\"]+)\"", text):
        yield html.unescape(target)
    for target in re.findall(r"<img [^>]*src=\"([^\"]+)\"", text):
        yield html.unescape(target)


def broken_links(site):
    pages = {path: path.read_text() for path in site.rglob("*.html")}
    anchors = {path: set(re.findall(r" id=\"([^\"]+)\"", text)) for path, text in pages.items()}
    for path, text in pages.items():
        for target in links(text):
            parts = urllib.parse.urlsplit(target)
            if parts.scheme or (target.startswith("#") and target[1:] in ("", *anchors[path])):
                continue
            there = (path.parent / urllib.parse.unquote(parts.path)).resolve()
            there = there if parts.path else path
            if not there.is_file():
                yield path.name, target
            elif parts.fragment and parts.fragment not in anchors.get(there, {parts.fragment}):
                yield path.name, target


def test_no_link_of_the_site_is_broken(site, tmp_path):
    assert len(list(site.rglob("*.html"))) > 40
    assert not list(broken_links(site))
    (tmp_path / "a.html").write_text('<a href="b.html">b</a> <p id="c"></p> <a href="#d">d</a>')
    assert list(broken_links(tmp_path)) == [("a.html", "b.html"), ("a.html", "#d")]


def test_the_questions_of_the_readme_are_answered_on_the_site(site):
    section = (ROOT / "README.md").read_text().partition("## Questions")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.+\?) \| (.+) \|$", section, re.M)
    assert len(rows) == 10
    for question, answers in rows:
        targets = re.findall(r"\]\(([^)]+)\)", answers)
        assert targets, question
        for target in targets:
            page, _, anchor = target.partition("#")
            text = (site / page).with_suffix(".html").read_text()
            assert not anchor or f'id="{anchor}"' in text, target


# In a browser.


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    opened = browsers.Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


def wait_for(browser, condition):
    script = f"const look = (done) => ({condition}) ? done(true) : setTimeout(look, 20, done);"
    return browser.run(f"{script} return new Promise(look)")


@needs_browser
@pytest.mark.parametrize(
    "page",
    [
        *("index.html", "docs/index.html", "docs/mogrifier.html", "docs/performance.html"),
        *("RESULTS.html", "notebooks/quickstart.html", "docs/api/mogrifier_jax.RNN.html"),
    ],
)
def test_pages_open_without_errors_and_without_a_network(site, browser, page):
    browser.open((site / page).as_uri())
    wait_for(browser, "document.readyState == 'complete' && document.querySelector('h1')")
    assert not [entry for entry in browser.logs("browser") if entry["level"] == "SEVERE"]
    assert all(address.startswith(("file:", "data:")) for address in browser.requests())


@needs_browser
def test_search_finds_dyneval(site, browser):
    browser.open((site / "search.html").as_uri() + "?q=dyneval")
    wait_for(browser, "document.querySelector('#search-results .search-summary, ul.search li a')")
    wait_for(browser, "document.querySelectorAll('ul.search li a').length")
    found = browser.run("return [...document.querySelectorAll('ul.search li a')].map(a => a.href)")
    assert any("/docs/evaluation.html" in address for address in found)


@needs_browser
def test_light_and_dark(site, browser):
    """The drawing is part of the page and follows its theme."""
    browser.open((site / "docs" / "mogrifier.html").as_uri())
    seen = {}
    for theme in ("light", "dark"):
        seen[theme] = browser.run(
            "document.body.dataset.theme = arguments[0];"
            "const colour = (node) => getComputedStyle(node);"
            "return [colour(document.body).backgroundColor,"
            " colour(document.querySelector('.drawing svg')).color]",
            theme,
        )
    for theme, is_dark in (("light", False), ("dark", True)):
        background, drawn = (sum(map(int, re.findall(r"\d+", c)[:3])) for c in seen[theme])
        assert (background < 150) == is_dark and (drawn > 500) == is_dark
        assert abs(background - drawn) > 400


@needs_browser
def test_narrow_windows_do_not_scroll_sideways(site, browser):
    browser.resize(390, 800)
    for page in ("docs/index.html", "docs/mogrifier.html", "docs/performance.html", "RESULTS.html"):
        browser.open((site / page).as_uri())
        assert browser.run("return innerWidth") == 390
        wide = "return document.documentElement.scrollWidth"
        assert browser.run(wide) <= 390, page
        add = "document.body.insertAdjacentHTML('beforeend', '<p style=\"width: 500px\">wide</p>');"
        assert browser.run(add + wide) > 390  # So it would be seen.
