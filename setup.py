"""Put the launch configs into the wheel; setup.cfg has everything else."""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

LAUNCH_CONFIGS = "accelerate_configs"


class BuildWithLaunchConfigs(build_py):
    """Copy accelerate_configs/ of the repository to mars_hf/accelerate_configs/ of the wheel."""

    def run(self) -> None:
        """Build as usual, then copy; an editable install finds the folder beside the package."""
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib) / "mars_hf" / LAUNCH_CONFIGS
            shutil.copytree(Path(__file__).parent / LAUNCH_CONFIGS, target, dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildWithLaunchConfigs})
