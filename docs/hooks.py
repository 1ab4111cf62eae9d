"""Hooks of the site's build: equations, what is made from the code, no remote parts."""

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

REMOTE = re.compile(r"<(?:script|link|img)\b[^>]*\b(?:src|href)=\"(https?:)?//[^>]*>")


def math_fence(source: str, *_: object, **__: object) -> str:
    """Writes a fence of LaTeX, one equation per line, as MathML; needs no script."""
    lines = [line for line in source.splitlines() if line.strip()]
    return "\n".join(convert(line, display="block") for line in lines)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Teaches fences named `math` to be equations."""
    fence = {"name": "math", "class": "math", "format": math_fence}
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


@event_priority(-100)
def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Removes the notebook template's remote scripts, and refuses any other."""
    if page.file.src_uri.endswith(".ipynb"):
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
