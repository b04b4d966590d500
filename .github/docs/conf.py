"""The site: the pages of the documents and the reference of the API; `.ci/docs` builds it.

The source is the whole repository, so that links between its files are links between pages. The
README is the front page, and addresses leave out the folders of the repository.
"""

from pathlib import Path

from sphinx.builders.html import StandaloneHTMLBuilder

import gluon_svrg

project = "gluon-svrg"
author = copyright = "The gluon-svrg maintainers"
release = version = gluon_svrg.__version__

extensions = ["sphinx.ext.autodoc", "numpydoc", "myst_parser"]
root_doc = "README"
include_patterns = [
    "README.md",
    "notebooks/**.md",
    "benchmarks/README.md",
    ".github/CONTRIBUTING.md",
    ".github/FOLDERS.md",
    ".github/CHANGELOG.md",
    ".github/docs/*.rst",
    ".github/docs/reference.md",
]
exclude_patterns = [".git", ".venv*", ".ci", "results", "gluon_svrg", "tests"]  # not searched
myst_heading_anchors = 3  # as on GitHub

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings have them
numpydoc_show_class_members = False  # autodoc shows them
default_role = "py:obj"

highlight_language = "text"  # of blocks without a language
html_theme = "furo"  # its wide tables scroll, and it loads nothing from other sites
html_static_path = html_css_files = ["site.css"]
html_copy_source = False
pygments_style, pygments_dark_style = "default", "monokai"
html_title = f"gluon-svrg {version}"

CONTENTS = (Path(__file__).parent / "contents.md").read_text()
ADDRESSES = {  # the beginning of a page's file, and of its address
    "README": "index",
    "notebooks/README.": "guide/",
    "notebooks/README": "guide/index",
    "notebooks/guide/": "guide/",
    "benchmarks/README": "benchmarks",
    ".github/CHANGELOG": "release_notes",
    ".github/CONTRIBUTING": "contributing",
    ".github/FOLDERS": "folders",
    ".github/docs/reference": "reference/index",
    ".github/docs/": "reference/",
}


class Site(StandaloneHTMLBuilder):
    """HTML pages with short addresses."""

    def get_target_uri(self, docname: str, typ: str | None = None) -> str:
        """The address of a page."""
        for place, address in ADDRESSES.items():
            if docname.startswith(place):
                docname = address + docname[len(place) :]
                break
        return f"{docname}.html"

    def get_output_path(self, page_name: str, /) -> Path:
        """The file of a page."""
        return Path(self.outdir, self.get_target_uri(page_name))

    get_outfilename = get_output_path  # its name before Sphinx 9


def add_contents(app, docname, source):
    """Append the table of contents to the front page."""
    if docname == root_doc:
        source[0] += f"\n{CONTENTS}"


def setup(app):
    """Register both."""
    app.add_builder(Site, override=True)
    app.connect("source-read", add_contents)
