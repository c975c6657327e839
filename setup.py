"""Put the launch configs into the wheel, and the repository's address into its metadata; setup.cfg has the rest."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
LAUNCH_CONFIGS = "accelerate_configs"
# Where this repository is published; CI knows it. Without it links of README stay relative.
REPOSITORY = os.environ.get("REPOSITORY_URL")


class BuildWithLaunchConfigs(build_py):
    """Copy accelerate_configs/ of the repository to mars_hf/accelerate_configs/ of the wheel."""

    def run(self) -> None:
        """Build as usual, then copy; an editable install finds the folder beside the package."""
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib) / "mars_hf" / LAUNCH_CONFIGS
            shutil.copytree(ROOT / LAUNCH_CONFIGS, target, dirs_exist_ok=True)


def long_description() -> str:
    """Return README.md with absolute links, since a package index has none of the files."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    if REPOSITORY is None:
        return text
    text = re.sub(r"(!\[[^\]]*\]\()(?!https?:)", rf"\1{REPOSITORY}/raw/HEAD/", text)
    return re.sub(r"((?<!!)\[[^\]]*\]\()(?!https?:|#)", rf"\1{REPOSITORY}/blob/HEAD/", text)


def project_urls() -> dict[str, str]:
    """Return the links beside the description."""
    urls = {
        "Paper": "https://arxiv.org/abs/2411.10438",
        "MARS-M paper": "https://arxiv.org/abs/2510.21800",
        "Official code": "https://github.com/AGI-Arena/MARS",
    }
    if REPOSITORY is not None:
        urls["Source"] = REPOSITORY
        urls["Documentation"] = f"{REPOSITORY}/blob/HEAD/docs/index.md"
        urls["Changelog"] = f"{REPOSITORY}/blob/HEAD/CHANGELOG.md"
        urls["Issues"] = f"{REPOSITORY}/issues"
    return urls


setup(
    cmdclass={"build_py": BuildWithLaunchConfigs},
    long_description=long_description(),
    long_description_content_type="text/markdown",
    project_urls=project_urls(),
)
