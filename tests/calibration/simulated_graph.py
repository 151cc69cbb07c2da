"""A stand-in for recording on a GPU: operations that a run puts there, repeated on the same tensors without the run."""

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class SimulatedRecorder:
    """Records as `runtime.cuda.driver.graph.Recorder` does: what was there before is as if nothing had been run."""

    def __init__(self) -> None:
        self.recorded = self.repeated = 0

    def __call__(self, run: Any) -> tuple[Any, Tensor]:
        self.recorded += 1
        with _Operations() as operations:
            made = run()
        operations.undo()
        for result in operations.results:
            result.fill_(123)  # nothing has been computed yet

        def repeat() -> None:
            self.repeated += 1
            operations.repeat()

        return repeat, made


class _Operations(TorchDispatchMode):
    """Runs operations and keeps them, with the tensors that they take and give."""

    def __init__(self) -> None:
        super().__init__()
        self._done: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self._before: list[tuple[Tensor, Tensor]] = []
        self._made: set[int] = set()

    @property
    def results(self) -> list[Tensor]:
        """The floating-point tensors that operations have made, views of others left out."""
        return [result for *_, fresh in self._done for result in fresh if result.dtype.is_floating_point]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for argument, given in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write and _place(given) not in self._made:
                self._before.append((given, given.clone()))
        made = func(*args, **(kwargs or {}))
        fresh = _fresh(made, args, kwargs)
        self._made |= {_place(of) for of in fresh}
        self._done.append((func, args, kwargs or {}, fresh))
        return made

    def undo(self) -> None:
        """Give tensors that were there before the values that they had."""
        for tensor, before in reversed(self._before):
            tensor.copy_(before)

    def repeat(self) -> None:
        for func, args, kwargs, fresh in self._done:
            for old, new in zip(fresh, _fresh(func(*args, **kwargs), args, kwargs), strict=True):
                old.copy_(new)


def _fresh(made: Any, *given: Any) -> list[Tensor]:
    """The tensors that are in memory of their own."""
    inputs = {_place(of) for of in _tensors(given)}
    return [of for of in _tensors(made) if _place(of) not in inputs]


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
