"""The pages of the documents and the reference of the API; `.ci/docs` builds them.

The source is the whole repository, so that links between its files are links between pages.
"""

import gluon_svrg

project = "gluon-svrg"
author = copyright = "The gluon-svrg maintainers"
release = version = gluon_svrg.__version__

extensions = ["sphinx.ext.autodoc", "numpydoc", "myst_parser"]
root_doc = ".github/docs/index"
include_patterns = [
    "README.md",
    "notebooks/**.md",
    "benchmarks/README.md",
    ".github/CONTRIBUTING.md",
    ".github/CHANGELOG.md",
    ".github/docs/**",
]
exclude_patterns = [".git", ".venv*", ".ci", "results", "gluon_svrg", "tests"]  # not searched

# The headings of GitHub are anchors, and its formulas are dollars.
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings have them
numpydoc_show_class_members = False  # autodoc shows them
default_role = "py:obj"

html_theme = "alabaster"
html_title = f"gluon-svrg {version}"
html_additional_pages = {"index": "redirect.html"}
templates_path = ["templates"]
