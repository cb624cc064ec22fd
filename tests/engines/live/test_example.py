"""The chat of examples/live changes its language in the middle of a session."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest
from importing import loaded

EXAMPLE = Path(__file__).parents[3] / "examples" / "live"


@pytest.fixture
def chat(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [str(EXAMPLE), *sys.path])
    return loaded(EXAMPLE / "chat.py")


def test_a_session(chat: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lines = ["hello one two", "/restart", "/language telugu", "hello one two", "/restart", "/language latin"]
    lines += ["/language swahili", "hello one two", "thanks", "/quit", "never read"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
    chat.main([])
    result = capsys.readouterr()
    swahili, telugu, again, more = result.out.strip().splitlines()
    assert swahili == again
    assert swahili != telugu
    assert more
    assert "no expert 'latin'" in result.err


def test_the_same_session_with_named_experts(
    chat: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from pico import make_pico

    experts = make_pico(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello one two\n"))
    chat.main([])
    expected = capsys.readouterr().out
    named = ["--task", f"math={experts['math']}", "--language", f"swahili={experts['swahili']}"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello one two\n"))
    chat.main(["--base-model", str(tmp_path / "base"), *named])
    assert capsys.readouterr().out == expected
    with pytest.raises(SystemExit):
        chat.main(named)
