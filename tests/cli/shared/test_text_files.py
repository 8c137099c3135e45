"""Files that a user names are read, whatever editor wrote them."""

from __future__ import annotations

from pathlib import Path

from selfspec.cli.shared.text_files import read_prompts


def test_prompts_of_an_editor_on_windows(tmp_path: Path) -> None:
    """It begins a file with a mark, and ends lines with two characters."""
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n{"turns": ["b", "c"]}\r\n')
    assert read_prompts(path, "--data") == ["a", ("b",)]
