"""The site: `make docs`. What it makes by itself is in site_pages.py and measured.py."""

import sys
from pathlib import Path

from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList
from docutils.utils.math.latex2mathml import tex2mathml

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import measured  # noqa: E402
import site_pages  # noqa: E402

import slimbayes  # noqa: E402

project = "slimbayes"
author = "The slimbayes contributors"
project_copyright = "The slimbayes contributors, Apache-2.0"
release = version = slimbayes.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3
default_role = "code"  # docstrings are read in editors: one backtick is code
highlight_language = "none"
nitpicky = False
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
# Types by which configs check themselves, as what they are made of.
autodoc_type_aliases = dict.fromkeys(("Count", "Whole", "Limit"), "int") | {
    "Layers": "str",
    "Family": "Distribution",
}
autodoc_type_aliases |= dict.fromkeys(
    ("Rate", "Positive", "NotNegative", "Precision"), "float"
)
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_inherit_docstrings = (
    False  # those of other libraries speak of directives that are not here
)
napoleon_custom_sections = [
    ("Shape", "notes_style"),
    ("Sizes", "notes_style"),
    ("Needs", "notes_style"),
]
maximum_signature_line_length = 88

html_theme = "furo"
html_title = f"slimbayes {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["copy.js"]
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True, "top_of_page_buttons": []}
html_copy_source = False


def inline_math(writer, node):
    """MathML, which browsers draw by themselves: the site loads nothing from elsewhere."""
    writer.body.append(tex2mathml(node.astext()))
    raise nodes.SkipNode


def block_math(writer, node):
    writer.body.append(
        f'<div class="math">{tex2mathml(node.astext(), as_block=True)}</div>\n'
    )
    raise nodes.SkipNode


class Measured(Directive):
    """`{measured}` with lines `tasks: A; B`, `cifar10: ...`, `steps: ...`, `parameters: ...`, `tables: PAGE; WORD`."""

    has_content = True

    def run(self):
        text = measured.measured(dict(line.split(":", 1) for line in self.content))
        node = nodes.container()
        self.state.nested_parse(
            StringList(text.splitlines(), "measured"), self.content_offset, node
        )
        return node.children


def setup(app):
    app.add_html_math_renderer("mathml", (inline_math, None), (block_math, None))
    app.add_directive("measured", Measured)
    app.connect("config-inited", lambda app, config: site_pages.write_api(HERE / "api"))
    app.connect("source-read", site_pages.keep_links_inside)
    app.connect("autodoc-skip-member", site_pages.skip_foreign)
    app.connect("autodoc-process-signature", site_pages.plain_types)
    app.connect(
        "autodoc-process-docstring", site_pages.say_arguments, priority=400
    )  # before napoleon looks at it
    app.connect("autodoc-process-docstring", site_pages.tidy_docstring, priority=600)


html_math_renderer = "mathml"
