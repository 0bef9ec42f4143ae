from __future__ import annotations

import copy
import pickle

from arriero.errors import UserError


def test_it_shows_the_problem_and_then_the_remedy() -> None:
    assert str(UserError("it broke")) == "it broke"
    assert str(UserError("it broke", "mend it")) == "it broke\nmend it"
    assert UserError("it broke").exit_code == 2


def test_it_travels_between_processes_whole() -> None:
    error = UserError("step 3 broke", "mend it", exit_code=1)
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is UserError
        assert (again.problem, again.remedy, again.exit_code) == ("step 3 broke", "mend it", 1)
        assert str(again) == str(error)
