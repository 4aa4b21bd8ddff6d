"""
Keeps the recorder's own errors out of the training that it records.

Calls of the script run inside functions of the recorder. What a call raises is the script's, and passes. What the
recorder raises ends the recording, and the call has the result that it would have without it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Guard:
    """Runs what records, until that fails for the first time."""

    def __init__(self, failed: Callable[[Exception], None], *, lets_pass: bool = False) -> None:
        """
        `failed` gets the first error. `lets_pass`: errors are raised, and `failed` is not called, as in a run that is
        made for the comparison: there the recorder communicates, and a rank that goes on alone keeps others waiting.
        """
        self._failed = failed
        self._lets_pass = lets_pass
        self.has_failed = False

    def run(self, record: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Return what `record` returns; None if it fails, or something has failed before."""
        if self.has_failed:
            return None
        try:
            return record(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - it must not reach the script
            self.fail(error)
            return None

    def around(self, record: Callable[[Callable[..., T]], T], call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """
        Return what `record` returns, which gets `call` to call it once, with these arguments or others.

        If it fails, return or raise what the call has returned or raised. If it was not called yet, it is now, with
        these arguments.
        """
        if self.has_failed:
            return call(*args, **kwargs)
        once = _Once(call)
        try:
            return record(once)
        except Exception as error:
            if error is once.error:
                raise
            self.fail(error)
            if once.error is not None:
                raise once.error from None
            return once.results[0] if once.results else call(*args, **kwargs)

    def fail(self, error: Exception) -> None:
        """The recorder has raised an error."""
        if self._lets_pass:
            raise error
        if not self.has_failed:
            self.has_failed = True
            self._failed(error)


class _Once(Generic[T]):
    """A function that keeps how its call has ended."""

    def __init__(self, function: Callable[..., T]) -> None:
        self._function = function
        self.results: list[T] = []
        self.error: BaseException | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> T:
        try:
            result = self._function(*args, **kwargs)
        except BaseException as error:
            self.error = error
            raise
        self.results.append(result)
        return result
