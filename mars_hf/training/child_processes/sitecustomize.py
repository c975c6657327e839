"""Register MARS when this process imports transformers, then run the sitecustomize that this file hides.

Python imports this file at startup, in processes below `python -m mars_hf run`. It imports torch and mars_hf only after
transformers, so that other programs pay nothing.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from typing import Any

_FOLDER = os.path.dirname(os.path.abspath(__file__))
_PACKAGE = os.path.dirname(os.path.dirname(_FOLDER))


def _load(name: str, file: str, **settings: Any) -> Any:
    """Import a module from a file."""
    spec = importlib.util.spec_from_file_location(name, file, **settings)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _call(module: str, function: str | None = None) -> None:
    """Import a module of mars_hf and call its function, or report that this process does not know MARS."""
    try:
        if "mars_hf" not in sys.modules:  # load the parent process's copy, wherever it is
            file = os.path.join(_PACKAGE, "__init__.py")
            _load("mars_hf", file, submodule_search_locations=[_PACKAGE])
        found = importlib.import_module(module)
    except ImportError as error:  # another Python, without torch
        print(f"mars_hf: --optim mars_* is unknown in this process: {error}", file=sys.stderr)
    else:
        if function is not None:
            getattr(found, function)()


def _run_hidden() -> None:
    """Run the sitecustomize that Python would have imported without this file."""
    paths = [path for path in sys.path if os.path.abspath(path) != _FOLDER]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", paths)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


# Loaded from its file: importing it from mars_hf would import torch.
_after_import = _load("_mars_hf_import_hooks", os.path.join(_PACKAGE, "training", "import_hooks.py")).after_import
# In steps, because transformers.trainer imports the first two modules during its own import.
_after_import("transformers.training_args", lambda: _call("mars_hf.training.registry", "add_names"))
_after_import("transformers.trainer_optimizer", lambda: _call("mars_hf.training.registry", "add_handlers"))
_after_import("transformers.trainer", lambda: _call("mars_hf.training.callbacks"))  # importing it installs
_after_import("transformers.trainer", lambda: _call("mars_hf.training.script_trainer", "replace_trainer"))
_run_hidden()
