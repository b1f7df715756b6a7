"""Sphinx's settings; `make docs` builds, warnings are errors."""

import re

from scaler_triton import __version__

project = "scaler_triton"
author = "the scaler_triton authors"
copyright = "2026, the scaler_triton authors"
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build", "notebooks", "recipes"]
html_theme = "furo"
html_title = f"scaler_triton {__version__}"
smartquotes = False  # error texts are searched for as they are printed
html_static_path = ["_static"]
html_css_files = ["pages.css"]
copybutton_prompt_text = r"\$ |>>> "  # what is copied is what was typed
copybutton_prompt_is_regexp = True
default_role = "code"  # docstrings are read in editors more often than here: one backtick is code

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_mock_imports = ["triton"]
napoleon_use_rtype = False
nitpicky = False


LABEL = re.compile(r"^(Returns|Yields|Raises|Warns|Args and raises|Args, returns and raises): (?=\S)")
LITERAL = re.compile(r"(?<=[^\s:])(:?)\n\n(?=    )")  # text, a blank line, an indented block


def as_rst(app, what, name, thing, options, lines):
    """Turn what docstrings write for people into what Sphinx reads: labels at a line's head, literal blocks."""
    labelled = False
    for index, line in enumerate(lines):
        labelled = bool(line) and (labelled or bool(LABEL.match(line)))
        if labelled:  # one paragraph, its further lines indented
            lines[index] = LABEL.sub(r"**\1:** ", line).lstrip()
    lines[:] = LITERAL.sub(lambda match: "::\n\n" if match[1] else "\n\n::\n\n", "\n".join(lines)).split("\n")


def setup(app):
    """Let `as_rst` see docstrings before napoleon does."""
    app.connect("autodoc-process-docstring", as_rst, priority=400)
