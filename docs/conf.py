"""Settings of the documentation site. ``make docs`` builds it, ``make docs-full`` also runs the gallery."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from sphinx_gallery.sorting import ExplicitOrder

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(Path(__file__).parent / "_ext"), str(ROOT / "src")]

from lopsided import __version__  # noqa: E402 (the path is set above)

project = "lopsided"
author = "The lopsided authors"
project_copyright = author
version = release = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_gallery.gen_gallery",
    "mathml",
    "site_pages",
]
# The lists of execution times load their tables from elsewhere on the network.
exclude_patterns = ["_ext/**", "sg_execution_times.rst", "gallery/sg_execution_times.rst"]
nitpicky = True
# Types of other packages have no page here, and their inventories are elsewhere on the network.
nitpick_ignore_regex = [
    (r"py:.*", r"(torch|numpy|npt|np|sklearn|collections|typing|pathlib|os|nn|Tensor|optional|default)\b.*"),
    (r"py:.*", r"(Any|Self|Literal|Mapping|Sequence|Callable|Floats|Ints|array-like|PathLike|ndarray|Generator)\b.*"),
]

# --- Markdown ---
myst_enable_extensions = ["dollarmath", "amsmath", "deflist", "colon_fence", "attrs_inline"]
myst_heading_anchors = 4
myst_links_external_new_tab = False

# --- Docstrings ---
autodoc_typehints = "none"  # The signature shows them; a second list of types would hide the sentences.
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
python_use_unqualified_type_names = True
python_display_short_literal_types = True
python_maximum_signature_line_length = 100
add_module_names = False

# --- Gallery ---
ORDER = ("plot_rare_class", "plot_lesions", "plot_vectors", "plot_threshold", "plot_label_errors", "plot_own_loop")
sphinx_gallery_conf = {
    "examples_dirs": "../examples/gallery",
    "gallery_dirs": "gallery",
    "filename_pattern": r"plot_",
    "within_subsection_order": ExplicitOrder([f"{name}.py" for name in ORDER]),
    "plot_gallery": os.environ.get("LOPSIDED_DOCS_FULL") == "1",
    "abort_on_example_error": True,
    "remove_config_comments": True,
    "show_memory": False,
    "show_signature": False,
    "download_all_examples": False,
    "min_reported_time": 1,
    "image_scrapers": ("matplotlib",),
    "reset_modules": ("matplotlib",),
}

# --- Pages ---
html_theme = "furo"
html_title = f"lopsided {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
html_math_renderer = "mathml"
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0072B2", "color-brand-content": "#005a8e"},
    "dark_css_variables": {"color-brand-primary": "#56B4E9", "color-brand-content": "#56B4E9"},
}
pygments_style = "friendly"
pygments_dark_style = "monokai"
