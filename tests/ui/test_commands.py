"""`windlass plot`, `report`, `compare --plot` and `ui` as commands."""

import re
import subprocess
import sys

import pytest

from tests.ui.folders import write_run


@pytest.fixture
def runs(tmp_path):
    root = tmp_path / "runs"
    root.mkdir()
    write_run(root, "first", steps=50)
    failed = write_run(root, "second", steps=60, rate=1e-3)
    failed.record("restart", attempt=2)
    failed.record("launched", attempt=2)
    failed.record("exit", state="failed", code=1, reason="<b>step 61</b>")
    failed.rank_log(0).write_text(
        "2026-01-01T00:00:01 rank 0 ERROR it failed\nTraceback (most recent call last):\n"
        "ValueError: HF_TOKEN=hf_abcdefghijklmnopqrstuvwxyz012345 <script>alert(1)</script>\n"
    )
    return root


def test_plot_writes_svg_and_png(windlass, runs, tmp_path):
    answer = windlass("plot", "first", "second", "-o", "loss.svg", "--smooth", "0.9", "--log", "--json")
    assert answer.code == 0, answer.err
    assert answer.json["runs"] == ["first", "second"]
    svg = (tmp_path / "loss.svg").read_text()
    assert svg.startswith("<svg")
    assert svg.count("<path d='M") > 6
    assert "currentColor" not in svg
    assert windlass("plot", "first", "-o", "speed.png", "--metric", "tokens_per_s", "--over", "time").code == 0
    content = (tmp_path / "speed.png").read_bytes()
    assert content.startswith(b"\x89PNG")
    assert int.from_bytes(content[16:20], "big") == 1600
    compared = windlass("compare", "first", "second", "--plot", "both.svg")
    assert compared.code == 0
    assert "train.learning_rate" in compared.out
    assert (tmp_path / "both.svg").exists()


def test_what_plot_refuses(windlass, runs, tmp_path):
    (runs / "first" / "metrics.jsonl").write_text("")
    for arguments, words in (
        (["first", "-o", "loss.gif"], "neither an .svg nor a .png"),
        (["nobody", "-o", "loss.svg"], "there is no run 'nobody'"),
        (["first", "-o", "loss.svg"], "no loss in first"),
        (["second", "-o", "loss.svg", "--size", "big"], "WIDTHxHEIGHT"),
    ):
        answer = windlass("plot", *arguments)
        assert (answer.code, words in answer.err) == (2, True), answer
    assert not list(tmp_path.glob("loss.*"))


def test_a_report_is_one_file_without_scripts_links_or_secrets(windlass, runs, tmp_path):
    answer = windlass("report", "second", "--json")
    assert answer.code == 0, answer.err
    page = (tmp_path / "second.html").read_text()
    assert answer.json["bytes"] == len(page.encode())
    assert "<script" not in page
    assert not re.search(r"(?:src|href)=", page)
    assert "hf_abcdefgh" not in page
    assert "&lt;b&gt;step 61&lt;/b&gt;" in page
    for words in ("Why it failed", "Curves", "Time line", "Hardware", "goodput", "learning_rate: 0.001", "attempt"):
        assert words in page, words
    assert page.count("<svg") >= 6
    assert "[removed]</pre>" not in page
    assert ": null" not in page
    assert "webhook: [removed]" not in page  # there is none


def test_without_the_extra_it_says_what_to_install(runs):
    program = "import sys; sys.modules['uvicorn'] = None; from windlass.cli.main import main; main(['ui'])"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert answer.returncode == 2
    assert "pip install 'windlass[ui]'" in answer.stderr


def test_a_taken_port_is_said(windlass, runs):
    import socket

    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        answer = windlass("ui", "--port", other.getsockname()[1])
    assert answer.code == 2
    assert "--port 0" in answer.err
    assert "no target 'moon'" in windlass("ui", "--on", "moon").err
