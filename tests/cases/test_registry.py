"""Every published case has a test that is marked as its own, and stands in docs/cases.md with the files that hold one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cases.registry import IDS, case, marked

ROOT = Path(__file__).resolve().parent.parent.parent
ROW = re.compile(r"^\| ([A-F]\d\d) \| .+ \| \[.+\]\(https://\S+\) \| (.+) \|$", re.MULTILINE)


def rows() -> dict[str, str]:
    """Return what each row of docs/cases.md links to as its tests, by id."""
    return dict(ROW.findall((ROOT / "docs/cases.md").read_text()))


def test_sixty_three_cases_are_published() -> None:
    assert len(IDS) == len(set(IDS)) == 63


@pytest.mark.parametrize("one", IDS)
def test_each_case_has_a_test_and_a_row_that_links_every_file_of_its_tests(one: str) -> None:
    shown = marked(ROOT / "tests").get(one, set())
    assert shown, f"no test is marked @case({one!r})"
    assert one in rows(), f"docs/cases.md has no row of {one}"
    linked = {(ROOT / "docs" / found).resolve() for found in re.findall(r"\((\S+)\)", rows()[one])}
    assert linked == shown


def test_a_mark_of_no_published_case_is_refused() -> None:
    with pytest.raises(ValueError, match="A02 is none of the published cases"):
        case("A02")


def test_a_mark_is_found_by_its_text_and_another_decorator_is_none(tmp_path: Path) -> None:
    (tmp_path / "test_x.py").write_text(
        '@case("A01", "B09")\n@mark.slow\ndef test_x(): ...\n@cases("A03")\ndef test_y(): ...\n'
    )
    assert {one: [path.name for path in paths] for one, paths in marked(tmp_path).items()} == {
        "A01": ["test_x.py"],
        "B09": ["test_x.py"],
    }
