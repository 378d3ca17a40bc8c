"""How the site is built: `make docs`. Nothing in the pages is loaded from another host."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "extensions"))

import backstory

project = "Backstory"
author = "The Backstory authors"
copyright = "the Backstory authors"
version = release = backstory.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "commands", "mathml", "measured"]
exclude_patterns = ["extensions"]
myst_enable_extensions = ["deflist", "dollarmath"]
myst_heading_anchors = 3

default_role = "code"  # docstrings quote names in single backticks
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # signatures stay readable; docstrings say what arguments are
autodoc_preserve_defaults = True
autodoc_default_options = {"members": True}
python_maximum_signature_line_length = 88
add_module_names = False

html_theme = "furo"
html_title = "Backstory"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_favicon = "static/icon.svg"
html_math_renderer = "mathml"
html_copy_source = html_show_sourcelink = False
