"""Run code after a module is imported, without importing it; uses only the standard library."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


class _Finder:
    """Find one module through the other finders, and call an action after it has executed."""

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        """Wait for the module called `name`."""
        self._name = name
        self._action = action
        self._searching = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the other finders' spec, with a loader that also calls the action."""
        if name != self._name or self._searching:
            return None
        self._searching = True  # another hook for the same module would ask this finder again
        try:
            finders = [finder for finder in sys.meta_path if hasattr(finder, "find_spec")]
            found = (finder.find_spec(name, path, target) for finder in finders)
            spec = next((spec for spec in found if spec is not None), None)
        finally:
            self._searching = False
        if spec is not None and spec.loader is not None:
            self._wrap(spec.loader)
        return spec

    def _wrap(self, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            if module.__name__ == self._name and self in sys.meta_path:  # a loader may serve several modules
                sys.meta_path.remove(self)
                self._action()

        loader.exec_module = exec_module


def after_import(name: str, action: Callable[[], None]) -> None:
    """Call `action` once `name` is imported; at once if it already is.

    Args:
        name: full name of a module.
        action: called without arguments; its exceptions reach the import statement.
    """
    module = sys.modules.get(name)
    if module is None:
        sys.meta_path.insert(0, _Finder(name, action))
    elif not getattr(module.__spec__, "_initializing", False):
        action()
