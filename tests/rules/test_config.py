"""The daemon's configuration: all errors at once with their places, secrets, precedence."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainwarden.rules.config import (
    ConfigError,
    check_address,
    load_config,
    read_config,
    read_secret,
    read_webhook_secret,
)
from trainwarden.rules.fields import seconds

GOOD = """\
listen: 127.0.0.1:17080
sources:
  - targets: ["127.0.0.1:17070"]
    token_file: ./token
  - folder: ".trainwarden/*/targets"
poll_interval: 500ms
receiver: {url: "http://127.0.0.1:17090/webhook", secret_file: ./secret}
"""


def errors_of(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read_config(text, "t.yml", Path("/somewhere"))
    return caught.value.errors


def test_a_good_file_is_read_with_its_defaults() -> None:
    config = read_config(GOOD, "t.yml", Path("/somewhere"))
    assert config.poll_interval == 0.5
    assert config.policy.mode == "observe"
    assert config.rules == ["default"]
    assert config.sources[1].folder == ".trainwarden/*/targets"
    assert config.path("./token") == Path("/somewhere/token")
    assert config.path("/abs") == Path("/abs")


def test_every_error_of_a_file_is_said_at_once_with_line_and_column() -> None:
    errors = errors_of(
        """\
listn: 127.0.0.1:17080
sources:
  - targets: ["127.0.0.1"]
  - {}
poll_interval: soon
policy: {mode: obey, max_rollbacks: -1}
receiver: {url: "ftp://x"}
"""
    )
    says = "\n".join(errors)
    for part in (
        "t.yml:1:1: listn: unknown field; did you mean listen?",
        "t.yml:3:5: sources[0]: '127.0.0.1' is not host:port",
        "t.yml:4:5: sources[1]: give either targets or folder",
        "t.yml:5:16: poll_interval: 'soon' is no duration",
        "t.yml:6:16: policy.mode:",
        "t.yml:6:37: policy.max_rollbacks:",
        "t.yml:7:11: receiver: field secret_file is missing",
    ):
        assert part in says
    assert len(errors) == 7


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "field sources is missing"),
        ("[]", "expected an object"),
        ("sources: []", "give at least one"),
        ("sources: [{targets: [a:1]}]\nbase: /etc", "t.yml:2:1: base: unknown field"),
        ("sources: [{targets: [a:1]}]\nsources: []", "t.yml:2:1"),
        ("sources: [{targets: [a:1]}]\nqueue_size: 0", "queue_size"),
        ("sources: [{targets: [a:1], folder: x}]", "give either targets or folder"),
        ("sources: {targets: [a:1]}", "sources: "),
        ("sources: [", "t.yml:1"),
        ("sources: [{targets: [a:1]}]\nlimits: {page_lines: 0}", "t.yml:2:9: limits: page_lines: 0 is not between"),
        ("sources: [{targets: [a:1]}]\nlimits: {response_bytes: -1}", "response_bytes: -1 is not between"),
        ("sources: [{targets: [a:1]}]\nlimits: {pages_per_poll: 0}", "pages_per_poll: 0 is not between"),
        ("sources: [{targets: [a:1]}]\npolicy: {history_steps: 9999999999}", "t.yml:2:25: policy.history_steps"),
        ("sources: [{targets: [a:1]}]\npolicy: {max_action_age: .inf}", "t.yml:2:26: policy.max_action_age"),
        ('sources: [{targets: [a:1]}]\nreceiver: {url: "http://", secret_file: s}', "receiver: url: 'http://' is not"),
        ('sources: [{targets: [a:1]}]\nreceiver: {url: "http://x:99999/", secret_file: s}', "receiver: url:"),
    ],
)
def test_what_cannot_be_used_is_refused_with_a_reason(text: str, says: str) -> None:
    assert says in "\n".join(errors_of(text))


def test_overrides_win_over_the_file() -> None:
    overrides = {"listen": "127.0.0.1:1", "mode": "act", "log_level": None, "poll_interval": "3s"}
    config = read_config(GOOD, "t.yml", Path(), overrides)
    assert (config.listen, config.policy.mode, config.poll_interval) == ("127.0.0.1:1", "act", 3.0)


def test_a_secret_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("whsec_" + "QUJDREVGR0hJSktMTU5PUFFSU1RVVldYWVowMTIzNDU=\n")
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="other users can read it"):
        read_secret(path)
    path.chmod(0o600)
    assert read_webhook_secret(path).startswith("whsec_")
    path.write_text("short")
    with pytest.raises(ConfigError, match="secret"):
        read_webhook_secret(path)
    path.write_text("")
    with pytest.raises(ConfigError, match="is empty"):
        read_secret(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_secret(tmp_path / "absent")


def test_durations_have_units() -> None:
    assert [float(seconds(text)) for text in ("500ms", "2s", "5m", "1h", "1d", 3, "1.5")] == [
        0.5,
        2,
        300,
        3600,
        86400,
        3,
        1.5,
    ]
    for wrong in ("", "s", "-1s", "0", "1w", True):
        with pytest.raises(ValueError, match="duration"):
            seconds(wrong)


def test_addresses_are_host_and_port() -> None:
    assert check_address("[::1]:80") == ("::1", 80)
    assert check_address("::1:80") == ("::1", 80)
    for wrong in (
        "",
        "x",
        ":80",
        "x:",
        "x:99999",
        "http://x:1/",
        "a b:80",
        "x:\uff11",
        "x:\u00b2",
        "x:" + "0" * 5000 + "1",
    ):
        with pytest.raises(ValueError, match="host:port"):
            check_address(wrong)


def test_a_word_that_is_none_of_the_known_ones_is_answered_with_them() -> None:
    with pytest.raises(ConfigError, match=r"policy\.mode: 'acts' is none of observe, approve, act"):
        read_config("sources: [{folder: x}]\npolicy: {mode: acts}\n", "t.yml", Path())


def test_a_missing_file_is_answered_with_where_one_to_begin_with_stands(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yml: there is no such file; docs/daemon\.md"):
        load_config(tmp_path / "absent.yml")


@pytest.mark.parametrize("mode", ["approve", "act"])
def test_acting_without_a_receiver_is_warned_of(mode: str) -> None:
    config = read_config("sources: [{folder: x}]\nact_token_file: x\n", "t.yml", Path(), {"mode": mode})
    assert config.warnings() == [
        f"policy.mode: {mode} without a receiver: nothing can be acted upon; configure receiver"
    ]
    assert read_config("sources: [{folder: x}]\n", "t.yml", Path()).warnings() == []


def test_a_copy_of_the_damaged_state_that_nobody_can_be_asked_for_is_warned_of() -> None:
    asked = "sources: [{folder: x}]\npolicy: {quarantine: true}\n"
    assert read_config(asked, "t.yml", Path()).warnings() == [
        "policy.quarantine: true without a receiver: no trainer can be asked for its state; configure receiver"
    ]
    receiver = "receiver: {url: 'http://127.0.0.1:1/webhook', secret_file: x}\n"
    assert read_config(asked + receiver, "t.yml", Path()).warnings() == []


def test_approval_that_nobody_can_give_is_warned_of() -> None:
    text = "sources: [{folder: x}]\nreceiver: {url: 'http://127.0.0.1:1/webhook', secret_file: x}\n"
    config = read_config(text, "t.yml", Path(), {"mode": "approve"})
    assert config.warnings() == [
        "policy.mode: approve without act_token_file: nobody can approve; configure act_token_file"
    ]


def test_planned_changes_stand_at_the_top_and_reach_the_judgement() -> None:
    text = (
        GOOD + "planned_changes:\n  - {step: 108000, kind: mixture, run: 'gpt-*', settle_steps: 300, note: phase 2}\n"
    )
    config = read_config(text, "x.yml", Path())
    (entry,) = config.settings.planned_changes
    assert (entry.run, entry.step, entry.kind, entry.settle_steps) == ("gpt-*", 108000, "mixture", 300)
    assert config.policy.planned_changes == ()


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ("{step: 0, kind: mixture}", "planned_changes[0].step"),
        ("{step: 5}", "field kind is missing"),
        ("{step: 5, kind: ''}", "planned_changes[0].kind"),
        ("{step: 5, kind: stage, setle_steps: 5}", "did you mean settle_steps?"),
        ("{step: 5, kind: mixtur}", "planned_changes[0].kind: unknown kind 'mixtur'; did you mean mixture?"),
        ("{step: 5, kind: lr_fase}", "did you mean lr_phase?"),
        (
            "{step: 5, kind: curriculum}",
            "known are stage, mixture, batch_size, lr_phase. A word of your own needs planned: true beside it",
        ),
        ("{step: 5, kind: stage, planned: false}", "it is true or left out"),
    ],
)
def test_a_planned_change_that_cannot_be_meant_is_named_with_its_line(entry: str, says: str) -> None:
    (found,) = errors_of(GOOD + f"planned_changes:\n  - {entry}\n")
    assert says in found
    assert found.split(":")[1] == str(GOOD.count("\n") + 2)


def test_a_word_of_ones_own_is_taken_where_it_says_that_it_is_planned() -> None:
    config = read_config(GOOD + "planned_changes: [{step: 5, kind: curriculum, planned: true}]\n", "x.yml", Path())
    (entry,) = config.settings.planned_changes
    assert (entry.kind, entry.planned) == ("curriculum", True)


def test_a_key_that_is_given_twice_hides_no_other_error() -> None:
    found = errors_of(GOOD + "log: {level: loud}\nlog: {}\nbase: x\npolicy: {planned_changes: []}\n")
    assert [one.splitlines()[0].split(": ")[1] for one in found] == [
        "log.level",
        f"duplicate key 'log', first given in line {GOOD.count(chr(10)) + 1}",
        "base",
        "policy.planned_changes",
    ]


def test_what_is_planned_is_no_part_of_the_policy() -> None:
    (found,) = errors_of("sources: [{targets: ['a:1']}]\npolicy: {planned_changes: []}\n")
    assert found.startswith("t.yml:2:")
    assert "stands at the top" in found
