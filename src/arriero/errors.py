"""The one error that is shown to people without a traceback."""

from __future__ import annotations


class UserError(Exception):
    """Something that the user can mend: says what is wrong with the values, then what to do.

    ``exit_code`` is 2 where nothing has started (bad usage, recipe or input) and 1 where work had begun.
    """

    def __init__(self, problem: str, remedy: str = "", *, exit_code: int = 2) -> None:
        super().__init__(f"{problem}\n{remedy}" if remedy else problem)
        self.problem = problem
        self.remedy = remedy
        self.exit_code = exit_code

    def __reduce__(self) -> tuple[object, ...]:
        # Errors travel between ranks, and an exception is otherwise rebuilt from its message alone.
        return _rebuild, (self.problem, self.remedy, self.exit_code)


def _rebuild(problem: str, remedy: str, exit_code: int) -> UserError:
    return UserError(problem, remedy, exit_code=exit_code)
