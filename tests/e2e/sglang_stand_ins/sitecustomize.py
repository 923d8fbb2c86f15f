"""Stands in for what a whole SGLang imports and does not use on a plain CPU; on PYTHONPATH.

torchvision is for models of images. sgl_kernel has no build for CPUs without AMX: SGLang computes
with torch there, but imports the names. transformers is told that there is no torchvision.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any
from unittest import mock


class StandInModule(types.ModuleType):
    """Has something for every name."""

    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return mock.MagicMock(name=name) if "sgl_kernel" in self.__name__ else type(name, (), {})


class StandInFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds them where nothing else does."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname.split(".")[0] not in ("torchvision", "sgl_kernel") or _asked_by_transformers():
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        return StandInModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _asked_by_transformers() -> bool:
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.endswith("transformers/utils/import_utils.py"):
            return True
        frame = frame.f_back
    return False


sys.meta_path.append(StandInFinder())
