"""Register MARS when this process imports transformers, then run the sitecustomize that this one hides.

Python imports it at its start, in processes below `python -m mars_hf run`. It imports neither torch nor mars_hf until
transformers is imported, so that other programs pay nothing.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from typing import Any

_FOLDER = os.path.dirname(os.path.abspath(__file__))
_PACKAGE = os.path.dirname(_FOLDER)


def _hooks() -> Any:
    """Load import_hooks.py alone: importing it from mars_hf would import torch."""
    spec = importlib.util.spec_from_file_location("_mars_hf_import_hooks", os.path.join(_PACKAGE, "import_hooks.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _call(module: str, function: str) -> None:
    """Call a function of mars_hf, or say that this process does not know MARS."""
    try:
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name != "mars_hf":
                raise
            sys.path.append(os.path.dirname(_PACKAGE))  # the parent process had it from its working directory
            found = importlib.import_module(module)
    except ImportError as error:  # another Python, without torch
        print(f"mars_hf: --optim mars_* is unknown in this process: {error}", file=sys.stderr)
    else:
        getattr(found, function)()


def _run_hidden() -> None:
    """Run the sitecustomize that would have been imported without this one."""
    paths = [path for path in sys.path if os.path.abspath(path) != _FOLDER]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", paths)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


_after_import = _hooks().after_import
# Three steps, because transformers.trainer imports the other two while it is being imported itself.
_after_import("transformers.training_args", lambda: _call("mars_hf.registry", "add_names"))
_after_import("transformers.trainer_optimizer", lambda: _call("mars_hf.registry", "add_handlers"))
_after_import("transformers.trainer", lambda: _call("mars_hf.callbacks", "install"))
_run_hidden()
