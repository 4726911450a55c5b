from __future__ import annotations

from pathlib import Path

import pytest
from prompt_toolkit.history import FileHistory

from deploy.cli.client.chat_terminal import MAX_BYTES, MAX_ENTRIES, history_file, open_history


def entries(path: Path) -> list[str]:
    """Newest first."""
    return list(open_history(path).load_history_strings())


def test_the_history_is_kept_and_only_its_owner_can_read_it(tmp_path: Path) -> None:
    path = tmp_path / "baton" / "chat_history"
    open_history(path).append_string("one\ntwo")
    open_history(path).append_string("three")
    assert entries(path) == ["three", "one\ntwo"]
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_a_history_that_others_could_read_is_closed_to_them(tmp_path: Path) -> None:
    path = tmp_path / "chat_history"
    path.write_text("\n# long ago\n+one\n")
    path.chmod(0o644)
    assert entries(path) == ["one"]
    assert path.stat().st_mode & 0o777 == 0o600


def test_the_oldest_questions_go(tmp_path: Path) -> None:
    path = tmp_path / "chat_history"
    history = open_history(path)
    for n in range(MAX_ENTRIES + 3):
        history.append_string(f"question {n}")
    kept = entries(path)
    assert len(kept) == MAX_ENTRIES
    assert kept[-1] == "question 3"
    open_history(path).append_string("x" * (MAX_BYTES - 100))
    assert len(entries(path)) < 20
    assert path.stat().st_size < MAX_BYTES + 4096


def test_a_history_that_cannot_be_written_lasts_as_long_as_the_conversation(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_text("")
    history = open_history(tmp_path / "file" / "chat_history")
    history.append_string("one")
    assert history.get_strings() == ["one"]


def test_a_full_disk_ends_no_conversation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left on device")

    history = open_history(tmp_path / "chat_history")
    monkeypatch.setattr(FileHistory, "store_string", full)
    history.append_string("one")
    assert history.get_strings() == ["one"]


def test_the_history_is_among_the_users_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert history_file() == Path("/state/baton/chat_history")
    monkeypatch.delenv("XDG_STATE_HOME")
    assert history_file() == Path.home() / ".local/state/baton/chat_history"
