"""Settings and secrets of the receiver: what is wrong is said once, with its place and the remedy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trainwarden.receiver.secretfile import SecretFileError, read_secrets, write_new_secret
from trainwarden.receiver.settings import SettingsError, settings_from


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"rooots": []}, ()),
        ({"roots": ["a", 5]}, ("roots", 1)),
        ({"listen": "nowhere"}, ("listen",)),
        ({"listen": "127.0.0.1:99999"}, ("listen",)),
        ({"tls_key": "k"}, ("tls_certificate",)),
    ],
)
def test_a_wrong_setting_is_named_by_its_path(changes: dict[str, Any], path: tuple[str | int, ...]) -> None:
    with pytest.raises(SettingsError) as error:
        settings_from({"secret_file": "s", "roots": ["r"]} | changes)
    assert error.value.path == path


def test_roots_must_be_folders(tmp_path: Path) -> None:
    settings = settings_from({"secret_file": "s", "roots": [str(tmp_path / "no")]})
    with pytest.raises(SettingsError, match=r"roots\.0: .* is no folder"):
        settings.root_folders()
    with pytest.raises(SettingsError, match="at least one"):
        settings_from({"secret_file": "s", "roots": []}).root_folders()
    assert settings_from({"secret_file": "s", "roots": ["r"], "listen": "[::1]:80"}).address() == ("::1", 80)


def test_a_new_secret_is_private_usable_and_never_overwrites(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    write_new_secret(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_secrets(path)[0].startswith("whsec_")
    with pytest.raises(SecretFileError, match="exists already"):
        write_new_secret(path)


def test_several_secrets_are_read_while_keys_are_rotated(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_new_secret(tmp_path / name)
    both = tmp_path / "both"
    both.touch(mode=0o600)
    both.write_text("# old\n" + (tmp_path / "a").read_text() + "\n" + (tmp_path / "b").read_text())
    assert len(read_secrets(both)) == 2


def test_a_secret_that_others_can_read_or_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    with pytest.raises(SecretFileError, match="new-secret"):
        read_secrets(path)
    path.touch(mode=0o600)
    with pytest.raises(SecretFileError, match="holds no secret"):
        read_secrets(path)
    path.write_text("whsec_c2hvcnQ=\n")
    with pytest.raises(SecretFileError, match=r"secret:1: "):
        read_secrets(path)
    path.chmod(0o644)
    with pytest.raises(SecretFileError, match="chmod 600"):
        read_secrets(path)


def test_neither_receiver_nor_supervisor_imports_torch() -> None:
    code = (
        "import sys; import trainwarden.receiver.main, trainwarden.receiver.supervise, trainwarden.receiver.keeper;"
        "print('torch' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


def test_the_supervisor_and_its_keeper_import_no_server() -> None:
    code = (
        "import sys; import trainwarden.receiver.supervise, trainwarden.receiver.keeper;"
        "print([name for name in ('uvicorn', 'starlette', 'sqlite3', 'structlog', 'requests') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
