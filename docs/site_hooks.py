"""Bring files of the repository that are no pages into the site: changelog, notebooks, pictures of the benchmarks.

Pages link to them as they lie in the repository, so that links work there as well.
"""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import mars_hf
from mars_hf.groups.settings import SETTINGS

ROOT = Path(__file__).resolve().parent.parent
# The beginning of a path, as pages and the changelog write it -> where the site has it.
_MOVED = {"../benchmarks/results/": "images/results/", "../CHANGELOG.md": "changelog.md", "docs/": ""}
# Where a line of code in a narrow table may end: after an opening bracket or an equals sign, outside of tags.
_WRAPS = re.compile(r"[(=](?=[^<>)][^<>]*</code>)")
# A short name in a table, such as mars-m, does not end a line after its hyphen.
_NAMES = re.compile(r"<code>(?=[\w.-]{1,16}</code>)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """State the version below every page."""
    config.copyright = f"mars_hf {mars_hf.__version__}"
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files."""
    changelog = ROOT / "CHANGELOG.md"
    files.append(File.generated(config, "changelog.md", abs_src_path=str(changelog)))
    for picture in sorted((ROOT / "benchmarks" / "results").glob("*.png")):
        files.append(File.generated(config, f"images/results/{picture.name}", abs_src_path=str(picture)))
    for notebook in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
        page, pictures = notebook_page(notebook)
        files.append(File.generated(config, f"notebooks/{notebook.stem}.md", content=page))
        for name, content in pictures.items():
            files.append(File.generated(config, f"notebooks/{name}", content=content))
    return files


def notebook_page(path: Path) -> tuple[str, dict[str, bytes]]:
    """Return a notebook with its stored outputs as Markdown, and the pictures among them by name."""
    parts, pictures = [], {}
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {"text/plain": output.get("text", "")})
            if "image/png" in data:
                name = f"{path.stem}_{len(pictures)}.png"
                pictures[name] = base64.b64decode("".join(data["image/png"]))
                parts.append(f"![Picture that the cell draws]({name})")
            else:
                parts.append(f"```text\n{''.join(data['text/plain']).rstrip()}\n```")
    title, *rest = parts[0].split("\n", 1)
    link = f'<a href="../{path.name}" download>Download the notebook</a>'  # beside the page's folder
    return "\n\n".join([title, link, *rest, *parts[1:]]) + "\n", pictures


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Point links at the places in the site, and fill in the table of settings."""
    for path, place in _MOVED.items():
        markdown = markdown.replace(f"]({path}", f"]({place}")
    markdown = re.sub(r"(\]\((?!https?:)[^)]*)\.ipynb\)", r"\1.md)", markdown)
    return markdown.replace("<!-- settings -->", settings_table())


def settings_table() -> str:
    """Return a row for each setting of `create`, with its name as anchor."""
    lines = ["| setting | default | accepted | |", "| --- | --- | --- | --- |"]
    for setting in SETTINGS.values():
        name = f'<code id="{setting.name}">{setting.name}</code>'
        default = "required" if setting.name == "lr" else f"`{setting.default!r}`"
        lines.append(f"| {name} | {default} | {setting.kind.accepted} | {setting.help} |")
    return "\n".join(lines)


def _cell(cell: re.Match[str]) -> str:
    """Return a cell of a table with the ends of lines that its code may have."""
    return _NAMES.sub('<code class="option">', _WRAPS.sub(r"\g<0><wbr>", cell[0]))


def on_page_content(html: str, **_: Any) -> str:
    """Leave out constructors' references to their class, wrap code in tables, keep an option's dashes with its name."""
    html = html.replace("<p>See the class.</p>", "")
    html = re.sub(r"<td.*?</td>", _cell, html, flags=re.DOTALL)
    return re.sub(r"(?<=[>\s])--\w[\w-]*", r'<span class="option">\g<0></span>', html)
