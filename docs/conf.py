"""The documentation site: `make docs` builds it from the Markdown files and notebooks.

The sources are the repository itself, so that a link between two files works on the site as it does
in the repository. The reference is made from the docstrings of all public names, here.
"""

import dataclasses
import importlib
import inspect
import pathlib
import re
import shutil
import sys
import types
import typing

import jaxtyping
from flax import linen, nnx

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

jaxtyping.set_array_name_format("array")  # The page shows the shapes of a function on a line.

import mogrifier_jax  # noqa: E402

project = "mogrifier_jax"
author = "The mogrifier_jax maintainers"
copyright = author
version = release = mogrifier_jax.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
include_patterns = [
    *("docs/*.md", "docs/api/*.rst", "notebooks/*.ipynb", "experiments/README.md"),
    *("launch/README.md", "RESULTS.md", "CHANGELOG.md", "CONTRIBUTING.md"),
]
nitpicky = True
# Types of other libraries, and letters that stand for sizes, have no page here.
nitpick_ignore_regex = [("py:.*", ".*")]

myst_enable_extensions = ["deflist"]
myst_heading_anchors = 4
nb_execution_mode = "off"  # Notebooks are kept with their outputs; tests run them.
nb_render_markdown_format = "myst"  # Without it, tables of notebooks are lines with bars.
nb_merge_streams = True

default_role = "code"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False
python_display_short_literal_types = True
python_maximum_signature_line_length = 80

html_theme = "furo"
html_title = f"mogrifier_jax {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_extra_path = ["_root"]  # index.html, which leads from the top to the first page.
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {"top_of_page_buttons": []}
pygments_style, pygments_dark_style = "friendly", "github-dark"


# The reference.

API = pathlib.Path(__file__).parent / "api"
MODULES = (mogrifier_jax, mogrifier_jax.nnx, mogrifier_jax.from_flax, mogrifier_jax.from_pytorch)
HAND_MADE = {"__init__", "__post_init__", "__repr__", "__reduce__"}
# What people call of a Flax module. Its other methods are for the modules of the package.
OF_MODULES = {"__call__", "initialize_carry", "num_feature_axes", "zero_carry", "initial_carry"}
OF_MODULES |= {"nats", "batch_nats", "logits", "gates"}


def public_names(module):
    """What `__all__` lists, or else what the page about the cells names."""
    if hasattr(module, "__all__"):
        names = module.__all__
    else:
        short, page = module.__name__.rpartition(".")[2], (ROOT / "docs" / "cells.md").read_text()
        names = [name for name in vars(module) if re.search(rf"\b{short}\.{name}\b", page)]
    return [name for name in names if not isinstance(getattr(module, name), types.ModuleType)]


def own_members(cls):
    """Methods and properties with a docstring that this package, not Flax, gives a class."""
    found = {}
    for base in reversed(cls.__mro__):
        if not base.__module__.startswith("mogrifier_jax"):
            continue
        for name, value in vars(base).items():
            shown = name == "__call__" or not name.startswith("_")
            member = isinstance(value, property) or inspect.isfunction(value)
            if shown and member and inspect.getdoc(value):
                found[name] = isinstance(value, property)
    fields = {f.name for f in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()
    shown = OF_MODULES if issubclass(cls, (linen.Module, nnx.Module)) else set(found)
    return {name: kind for name, kind in found.items() if name in shown - fields - HAND_MADE}


def results(cls):
    """The named tuples that methods of a class return."""
    found = {}
    for member in own_members(cls):
        value = inspect.getattr_static(cls, member)
        returned = value.__annotations__.get("return") if inspect.isfunction(value) else None
        if (
            inspect.isclass(returned)
            and issubclass(returned, tuple)
            and hasattr(returned, "_fields")
        ):
            found[returned] = None
    return list(found)


def described_fields(cls):
    """The fields of a named tuple and its properties, with what comments and docstrings say."""
    above = []
    for line in inspect.getsource(cls).splitlines():
        comment = line.partition("#")[2].strip()
        if field := re.match(r"    (\w+): ", line):
            shape = getattr(cls.__annotations__.get(field[1]), "dim_str", None)
            above += [] if shape is None else [f"[{', '.join(shape.split())}]"]
            yield field[1], " ".join([*above, comment]).strip() or field[1]
            above = []
        elif line.strip().startswith("#"):
            above.append(comment)
    for name, value in vars(cls).items():
        if isinstance(value, property):
            yield name, inspect.getdoc(value)


def entry(module, name):
    """The page of one name."""
    value = getattr(module, name)
    full = f"{module.__name__}.{name}"
    short = full.removeprefix("mogrifier_jax.").removeprefix("nn.")
    lines = [short, "=" * len(short), ""]
    if inspect.isclass(value):
        lines += [f".. autoclass:: {full}", ""]
        for member, is_property in own_members(value).items():
            kind = "property" if is_property else "method"
            lines += [f"   .. auto{kind}:: {full}.{member}", ""]
        for result in results(value):
            lines += [result.__name__, "-" * len(result.__name__), ""]
            lines += [*to_rst(inspect.getdoc(result).splitlines()), ""]
            lines += [f"- `{field}`: {escape(text)}" for field, text in described_fields(result)]
            lines += [""]
    elif inspect.isroutine(value):
        lines += [f".. autofunction:: {full}", ""]
    else:
        lines += [f".. autodata:: {full}", ""]
    return "\n".join(lines)


def first_sentence(value):
    """What the table of a module says of a name."""
    text = " ".join((inspect.getdoc(value) or "").partition("\n\n")[0].split())
    return to_rst([re.split(r"(?<=[.;:]) ", text)[0].rstrip(";:")])[0]


def write_reference(_):
    """A page for each public name, and one for each module with a table of them."""
    shutil.rmtree(API, ignore_errors=True)
    API.mkdir()
    for module in map(importlib.import_module, (each.__name__ for each in MODULES)):
        title = f"``{module.__name__.removeprefix('mogrifier_jax.nn.')}``"
        lines = [
            title,
            "=" * len(title),
            "",
            f".. automodule:: {module.__name__}",
            "   :no-members:",
        ]
        lines += ["   :no-index:", "", ".. list-table::", "   :widths: 2 5", ""]
        for name in public_names(module):
            page = f"{module.__name__}.{name}"
            (API / f"{page}.rst").write_text(entry(module, name))
            lines += [f"   * - :doc:`{name} <{page}>`"]
            lines += [f"     - {first_sentence(getattr(module, name))}"]
        lines += ["", ".. toctree::", "   :hidden:", ""]
        lines += [f"   {name} <{module.__name__}.{name}>" for name in public_names(module)]
        (API / f"{module.__name__}.rst").write_text("\n".join(lines) + "\n")


def to_rst(lines):
    """Docstrings are plain text with `code` and indented examples; RST has other ideas of both."""
    text, block = [], False
    for index, line in enumerate(lines):
        before = lines[index - 1] if index else ""
        if line.strip() and not line.startswith("    "):
            block = False
        begins = line.startswith("    ") and not before.strip() and index and not block
        if begins and not line.lstrip().startswith((">>>", ":", "..", "-", "*")):
            last = next((each for each in reversed(text) if each.strip()), "")
            if not last.startswith((" ", ":", "..")):
                text.append("::\n")
                text.append("")
                block = True
        verbatim = block or line.lstrip().startswith((">>>", "...", ":", ".."))
        text.append(line if verbatim else escape(line))
    return "\n".join(text).split("\n")


def escape(line):
    """Stars, bars and final underscores outside code are characters."""
    parts = re.split(r"(``[^`]+``|`[^`]+`)", line)
    return "".join(
        part if index % 2 else re.sub(r"(\*|\||_(?=\W|$))", r"\\\1", part)
        for index, part in enumerate(parts)
    )


def shapes_of(hint):
    """The shapes in an annotation, as [B, T]; a tree has that of its leaves."""
    inner = (*typing.get_args(hint), getattr(hint, "leaftype", None))
    if (shape := getattr(hint, "dim_str", "...")) not in ("", "..."):
        return [f"[{', '.join(shape.split())}]"]
    return list(dict.fromkeys(shape for each in inner if each for shape in shapes_of(each)))


def describe_shapes(function):
    """A sentence with the shapes of arguments and results; empty if annotations have none."""
    found = {name: shapes_of(hint) for name, hint in function.__annotations__.items()}
    results = found.pop("return", [])
    parts = [f"`{name}` {' or '.join(shapes)}" for name, shapes in found.items() if shapes]
    parts += [f"results {', '.join(results)}"] if results else []
    return f"Shapes: {'; '.join(parts)}." if parts else ""


def process_docstring(app, what, name, value, options, lines):
    """Runs before napoleon reads the sections."""
    if inspect.isfunction(value) and (shapes := describe_shapes(value)):
        end = lines.index("") if "" in lines else len(lines)
        lines[end:end] = ["", shapes]
    lines[:] = to_rst(lines)


def process_signature(app, what, name, value, options, signature, returned):
    """Leaves out what Flax adds to every module."""
    if signature:
        signature = re.sub(r"\s+", " ", signature)
        signature = re.sub(r", parent(: [^=]+)? ?= ?<[^>]*>", "", signature)
        signature = re.sub(r", name(: [^=]+)? ?= ?None", "", signature)
        signature = re.sub(r"<PjitFunction of (<.+?>)>", r"\1", signature)
        signature = re.sub(r"<function (\w+)[^>]*>", r"\1", signature)
        signature = re.sub(r"<class '[\w.]*?(\w+)'>", r"\1", signature)
    return signature, returned


def inline_drawings(app, page, template, context, doctree):
    """Puts drawings into the page itself, where they follow its light and dark colours."""
    drawing = (ROOT / "docs" / "mogrifier.svg").read_text()
    figure = f'<div class="drawing">{drawing}</div>'
    body = context.get("body", "")
    context["body"] = re.sub(r"<img [^>]*mogrifier\.svg[^>]*/?>", lambda _: figure, body)


def setup(app):
    """Sphinx calls this."""
    app.connect("autodoc-process-signature", process_signature)
    app.connect("html-page-context", inline_drawings)
    app.connect("builder-inited", write_reference)
    app.connect("autodoc-process-docstring", process_docstring, priority=100)
