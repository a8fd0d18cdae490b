from __future__ import annotations

from trainwarden.rules.core.counted import counted


def test_one_is_not_many() -> None:
    assert [counted(number, "step") for number in (0, 1, 2)] == ["0 steps", "1 step", "2 steps"]
