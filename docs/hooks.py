"""Hooks of the site's build: equations, what is made from the code, no remote parts."""

import logging
import re
import sys
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.plugins import event_priority
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))
import generated

NO_TEXT = 'alt="No description has been provided for this image"'
REMOTE = re.compile(r"<(?:script|link|img)\b[^>]*\b(?:src|href)=\"(https?:)?//[^>]*>")


def math_fence(source: str, *_: object, **__: object) -> str:
    """Writes a fence of LaTeX, one equation per line, as MathML; needs no script."""
    lines = [line for line in source.splitlines() if line.strip()]
    written = "\n".join(convert(line, display="block") for line in lines)
    if "\\" in written:
        raise PluginError(f"an equation has a command that is not known: {source}")
    return written


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Teaches fences named `math` to be equations."""
    fence = {"name": "math", "class": "math", "format": math_fence}
    # nbconvert misses the texts of pictures that `_name_pictures` puts in later.
    logging.getLogger("traitlets").setLevel(logging.ERROR)
    config.mdx_configs["pymdownx.superfences"] = {"custom_fences": [fence]}
    return config


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Puts generated parts where a page names them."""
    for name, write in (
        ("{{ settings }}", generated.settings),
        ("{{ commands }}", generated.commands),
    ):
        if name in markdown:
            markdown = markdown.replace(name, write())
    return markdown


def _name_pictures(output: str) -> str:
    """Gives pictures of a notebook the heading above them as alternative text."""
    heading, parts = "", []
    for part in re.split(r"(<h2\b[^>]*>.*?</h2>)", output, flags=re.DOTALL):
        if part.startswith("<h2"):
            heading = re.sub(r"<[^>]*>|[¶\"]", "", part).strip()
        parts.append(part.replace(NO_TEXT, f'alt="{heading}"'))
    return "".join(parts)


@event_priority(-100)
def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Removes the notebook template's remote scripts, and refuses any other."""
    if page.file.src_uri.endswith(".ipynb"):
        output = _name_pictures(output)
        output = re.sub(
            r"<script\b[^>]*\bsrc=\"(https://[^>]*)?\">\s*</script>", "", output
        )
    remote = [
        found.group(0)
        for found in REMOTE.finditer(output)
        if 'rel="canonical"' not in found.group(0)
    ]
    if remote:
        raise PluginError(f"{page.file.src_uri} loads {remote[0]} from elsewhere")
    return output
