"""The site builds without warnings and network, and its figures are those that the script draws."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from pages import PAGES, ROOT, commands
from PIL import Image

import mars_hf

needs_mkdocs = pytest.mark.skipif(
    importlib.util.find_spec("material") is None or importlib.util.find_spec("mkdocstrings") is None,
    reason="the test extra brings mkdocs-material and mkdocstrings",
)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    finished = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return folder


@needs_mkdocs
def test_site(site):
    """It has every public name, all pictures and the changelog, and loads nothing from elsewhere."""
    page = (site / "api" / "index.html").read_text(encoding="utf-8")
    assert [name for name in mars_hf.__all__ if f'id="mars_hf.{name}"' not in page] == []
    loads = re.compile(r"""<(?:script|link|img)\b[^>]*?(?:src|href)=["']?(https?://[^"'\s>]+)""")
    for page in site.rglob("*.html"):
        assert loads.findall(page.read_text(encoding="utf-8")) == [], page
    assert (site / "changelog" / "index.html").is_file()
    shown = re.findall(r"benchmarks/results/(\w+\.png)", PAGES["speed.md"].read_text(encoding="utf-8"))
    assert shown and all((site / "images" / "results" / name).is_file() for name in shown)


def test_navigation():
    def leaves(entry):
        if isinstance(entry, str):
            return [entry]
        return [leaf for part in (entry if isinstance(entry, list) else entry.values()) for leaf in leaves(part)]

    class Loader(yaml.SafeLoader):
        """Reads mkdocs' tag for variables of the environment."""

    Loader.add_constructor("!ENV", lambda loader, node: None)
    nav = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)["nav"]
    assert sorted(leaves(nav)) == sorted([*(PAGES.keys() - {"README.md"}), "changelog.md"])


@pytest.mark.slow
def test_figures(tmp_path):
    """The pictures have the same names and sizes; pixels differ with matplotlib's version."""
    script = ROOT / "docs" / "figures" / "draw.py"
    subprocess.run([sys.executable, str(script), "--output_dir", str(tmp_path)], check=True, capture_output=True)
    drawn = sorted(path.name for path in tmp_path.glob("*.png"))
    assert drawn
    for name in drawn:
        with Image.open(tmp_path / name) as new, Image.open(ROOT / "docs" / "images" / name) as kept:
            assert new.size == kept.size
    pages = "\n".join(path.read_text(encoding="utf-8") for path in PAGES.values())
    for picture in (ROOT / "docs" / "images").glob("*.png"):
        assert f"images/{picture.name}" in pages, f"{picture.name} is on no page"


def test_readme():
    lines = PAGES["README.md"].read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 120
    first, second = list(commands("README.md"))
    assert first == "pip install -c constraints.txt -e '.[recipes]' && accelerate launch recipes/pretrain_gpt2.py"
    assert second == "pip install -c constraints.txt -e '.[test]' && python -m pytest"
    # .ci/run looks for it with sed, at the beginning of a line
    assert sum(bool(re.fullmatch(r"pip install .*\[test\].*pytest", line)) for line in lines) == 1


def test_links_of_readme():
    text = PAGES["README.md"].read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)]+)\)", text) if not link.startswith("http")]
    assert links
    for link in links:
        path, _, anchor = link.partition("#")
        assert (ROOT / path).is_file(), link
        if anchor:
            headings = re.findall(r"^#+ (.*)$", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings], link
