"""Progress of a download, in words."""

from __future__ import annotations

import pytest

from worker.repository.download_progress import EVERY_S, Downloaded, teller


def test_it_is_told_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    """Not with every block, but always at the end; nothing is printed."""
    now, told = [0.0], list[Downloaded]()
    with teller(told.append, "model.safetensors", lambda: now[0])(total=2_000_000_000, desc="(…)l.safetensors") as bar:
        for _ in range(20):
            bar.update(100_000_000)
            now[0] += EVERY_S / 4
    assert [str(one) for one in told] == [
        f"downloading model.safetensors: {share} % of 2.0 GB" for share in (5, 25, 45, 65, 85, 100)
    ]
    assert capsys.readouterr() == ("", "")
