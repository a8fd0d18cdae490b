"""The report of an incident is served by the daemon and written by the command line, from what the daemon kept of it alone."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.rules.core.runs import Attempt, core, dirty, only
from trainwarden.rules.api import Api
from trainwarden.rules.cli import app
from trainwarden.rules.commands import Commands
from trainwarden.rules.core.effects import Save
from trainwarden.rules.daemon.inbox import Inbox
from trainwarden.rules.metrics import Metrics
from trainwarden.rules.store import Commit, SavedRow, Store


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The address of an API over a database with one incident and its curves, and the incident's id."""
    played = core()
    played.play(Attempt(last=400, changes=[dirty(301, 400)], end=None))
    commit = Commit()
    for one in played.effects:
        if isinstance(one, Save):
            commit.rows[one.kind, one.key] = SavedRow(one.kind, one.key, one.row)
    store = Store(tmp_path_factory.mktemp("daemon") / "state.db")
    store.commit(commit, {}, 0.0)
    api = Api(store, Metrics(), lambda: "", Commands(store, Inbox(10), None), ("127.0.0.1", 0))
    api.start()
    yield f"http://{api.address}", only(played.incidents)["id"]
    api.stop()
    store.close()


def get(url: str) -> tuple[str, str]:
    with urllib.request.urlopen(url, timeout=10) as response:
        return response.read().decode(), response.headers["content-type"]


def test_the_page_has_the_curves_that_were_kept_and_leads_to_the_markdown(served: tuple[str, str]) -> None:
    url, incident = served
    page, kind = get(f"{url}/incidents/{incident}")
    assert kind.startswith("text/html")
    assert "Loss around step 301" in page
    assert "Triage, from cheap to dear" in page
    assert f'href="{incident}.md"' in page
    markdown, kind = get(f"{url}/incidents/{incident}.md")
    assert kind.startswith("text/markdown")
    assert "## Triage, from cheap to dear" in markdown


def test_an_incident_that_is_not_there_has_none(served: tuple[str, str]) -> None:
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get(f"{served[0]}/incidents/inc_other")


def test_the_command_line_writes_both_and_refuses_another_kind_of_file(served: tuple[str, str], tmp_path: Path) -> None:
    url, incident = served
    for name, begins in (("report.html", "<!doctype html>"), ("report.md", "# ")):
        ran = CliRunner().invoke(app, ["incidents", "show", incident, "-o", str(tmp_path / name), "--url", url])
        assert ran.exit_code == 0, ran.output
        assert (tmp_path / name).read_text().startswith(begins)
    wrong = CliRunner().invoke(app, ["incidents", "show", incident, "-o", str(tmp_path / "report.pdf"), "--url", url])
    assert wrong.exit_code == 2
    gone = CliRunner().invoke(app, ["incidents", "show", "inc_other", "-o", str(tmp_path / "x.md"), "--url", url])
    assert gone.exit_code == 1
    assert "no incident inc_other" in gone.output
    assert not (tmp_path / "x.md").exists()
