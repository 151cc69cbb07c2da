"""Modules that are named like the one function that they are for.

`sparsepack.pack` is a module, and the function that a program wants to call. Python lets the import of the one hide the
other, in an order that depends on who imported what first. So such a module is both: called, it calls its function.
"""

import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any


class VerbModule(ModuleType):
    """A module that can be called. Signature and help are those of its function, which is imported when asked for."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__wrapped__(*args, **kwargs)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        module, _, name = self.__dict__["_verb"].partition(":")
        function: Callable[..., Any] = getattr(import_module(module), name)
        return function


def callable_as(module: str, function: str) -> None:
    """Let a module be called, as "module:function"; its last lines say so."""
    itself = sys.modules[module]
    itself.__dict__["_verb"] = function
    itself.__class__ = VerbModule
