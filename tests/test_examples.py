"""Every example: loads, is planned and rendered without a cluster; the notebook is run by test_wheel.py."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.test_docs import alternatives, parse
from windlass.catalog.models import presets
from windlass.spec import load_run

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").rglob("*.yaml"))
NOTEBOOK = ROOT / "examples" / "notebook.ipynb"


def named(path):
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", EXAMPLES, ids=named)
def test_an_example_loads_and_the_commands_in_it_parse(path):
    load_run(path)
    for line in re.findall(r"^# +(?:.*: +)?(windlass .*)$", path.read_text(), re.MULTILINE):
        if "…" not in line:
            parse(next(alternatives(line)))


def test_every_published_preset_has_an_example_that_fits_its_hardware(windlass):
    published = {name for name in presets() if not name.endswith("tiny")}
    assert {path.stem for path in (ROOT / "examples" / "presets").iterdir()} == published
    for name in sorted(published):
        answer = windlass("plan", ROOT / "examples" / "presets" / f"{name}.yaml", "--json")
        assert answer.code == 0, answer.out
        assert answer.json["memory"]["share"] < 1
        assert answer.json["usd"] > 0


@pytest.mark.parametrize("path", EXAMPLES, ids=named)
def test_an_example_is_rendered(windlass, path, monkeypatch, tmp_path):
    """For its own target; for machines with GPUs, and presets, on Kubernetes, which needs nothing of this machine."""
    monkeypatch.setenv("HF_TOKEN", "hf_for_the_dry_run")
    run = load_run(path)
    if not run.data.source.startswith(("hf:", "corpus:")):
        pytest.skip("its data is yours")
    overrides = []
    if run.target.kind != "kubernetes":
        overrides = ["--on", "kubernetes", "image.name=registry.example/windlass:1"]
        overrides += ["target.kubernetes.storage=pvc:runs"] if run.resources.nodes > 1 else []
        is_open = not run.resources.instance and run.resources.processes_per_node is None
        overrides += ["resources.gpus_per_node=8"] if is_open else []
    answer = windlass("run", path, *overrides, "--dry-run", "--offline", "--json")
    assert answer.code == 0, answer
    request = answer.json["request"]
    assert request["kind"] == ("hyperpod" if path.stem == "hyperpod" else request["kind"])
    assert request["objects"]


def test_the_notebook_says_what_parses():
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    for source in sources:
        for line in source.splitlines():
            if line.startswith("!"):
                parse(line[1:])
        compile("\n".join(line for line in source.splitlines() if not line.startswith("!")), "cell", "exec")
