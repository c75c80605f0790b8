"""A real browser on a real training that runs, is killed, goes on and fails while the page is open."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

import windlass as windlass_package
from tests.ui.conftest import windlass
from tests.ui.folders import write_run
from windlass.common.files import read_json_lines
from windlass.targets.launch.processes import processes_of

pytestmark = [pytest.mark.train, pytest.mark.slow]

RUN_FILE = """\
name: live
model: {preset: llama-tiny}
data: {source: 'corpus:austen', sequence_length: 32, holdout: 0.02}
train: {steps: 400, global_batch: 4, precision: fp32, validate_every: 20, validation_sequences: 4}
resources: {gpus_per_node: 0, processes_per_node: 2}
checkpoint: {every: 10}
"""
# The run stands still where the page is looked at: at step 15 for a moment, at step 40 until it is killed, and at
# step 80 of the second attempt; the loss of step 120 is not a number.
FAULTS = (
    "sleep:rank=0,step=15,seconds=3;sleep:rank=0,step=40,seconds=600;sleep:rank=0,step=80,seconds=4;nan:rank=0,step=120"
)


@pytest.fixture(scope="module")
def training(runs, page_server, tmp_path_factory):
    """The run, started when the page is open; ended with the tests, however they end."""
    folder = runs / "live"
    run_file = tmp_path_factory.mktemp("run") / "live.yaml"
    run_file.write_text(RUN_FILE)
    environment = {**os.environ, "WINDLASS_RUNS": str(runs)}

    def start():
        command = windlass("run", run_file, "--detach", "--inject", FAULTS)
        subprocess.run(command, env=environment, check=True, capture_output=True, timeout=240)
        return folder

    yield start
    subprocess.run(windlass("stop", "live", "--now"), env=environment, check=False, capture_output=True, timeout=240)


STEP = "Number(document.querySelector('.facts dd')?.textContent.split(' / ')[0].replace(',', ''))"
LOSS_POINTS = "document.querySelector('figure[data-metric=loss] .uplot') !== null"


def rank_processes(folder):
    """The processes of ranks; torchrun, which watches them, has the folder in its environment too."""
    found = []
    for pid in processes_of(folder):
        with open(f"/proc/{pid}/environ", "rb") as file:
            if b"\0LOCAL_RANK=" in b"\0" + file.read():
                found.append(pid)
    return found


def test_a_run_is_seen_to_train_die_go_on_and_fail(open_tab, training, runs):
    write_run(runs, "earlier", steps=300, ranks=2)
    overview = open_tab()
    overview.open("/")
    assert "earlier" in overview.text(".runs")
    folder = training()
    overview.wait_for("document.querySelector('tr[data-run=live] .state')?.dataset.state === 'running'")

    tab = open_tab()
    tab.open("/run?id=live")
    tab.wait_for(f"{STEP} >= 1")
    first = tab.page.evaluate(STEP)
    tab.wait_for(f"{STEP} >= 39 && {STEP} > {first}")  # without a reload: the curves move
    tab.wait_for(LOSS_POINTS)
    tab.wait_for("document.querySelector('figure[data-metric=validation_loss]') !== null")
    tab.wait_for("document.querySelector('.log').textContent.includes('step ')")
    tab.shoot("running")
    overview.wait_for("document.querySelector('tr[data-run=live] progress').value >= 39")
    overview.shoot("list", height=290)

    os.kill(rank_processes(folder)[0], signal.SIGKILL)
    tab.wait_for("document.querySelector('.happened').textContent.includes('SIGKILL')")
    tab.wait_for("document.querySelectorAll('.track .attempt').length === 2")
    tab.wait_for(f"{STEP} >= 79")
    assert "attempt 2" in tab.text(".happened")
    assert "resumed from the checkpoint of step" in tab.text(".happened")

    tab.wait_for("document.querySelector('.bar .state').dataset.state === 'failed'")
    tab.wait_for("document.querySelector('.verdict') !== null")
    verdict = tab.text(".verdict")
    assert "step 120 was stopped before its optimizer step" in verdict
    assert "Fix" in verdict
    assert str(Path(windlass_package.__file__).parents[1]) not in verdict  # where windlass is installed
    assert tab.page.locator(".scroll tbody tr").count() >= 2  # checkpoints
    tab.shoot("failed")
    deaths = [record for record in read_json_lines(folder / "history.jsonl") if record["event"] == "rank-died"]
    assert deaths[0]["signal"] == "SIGKILL"

    see_zoom_and_smoothing(tab)
    see_comparison(overview)


def see_zoom_and_smoothing(tab):
    chart = tab.page.locator("figure[data-metric=loss] .u-over")
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    whole = tab.page.locator("button", has_text="Whole run")
    assert whole.is_disabled()
    with tab.page.expect_request(lambda request: "/api/series" in request.url and "from=" in request.url) as asked:
        tab.page.mouse.move(box["x"] + box["width"] * 0.25, box["y"] + 50)
        tab.page.mouse.down()
        tab.page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 60, steps=5)
        tab.page.mouse.up()
    assert "to=" in asked.value.url
    tab.wait_for("!document.querySelector('#curves button').disabled")
    whole.click()
    tab.wait_for("document.querySelector('#curves button').disabled")

    plot = tab.page.locator("figure[data-metric=loss] .plot")  # and by keys alone
    plot.focus()
    plot.press("+")
    tab.wait_for("!document.querySelector('#curves button').disabled")
    plot.press("0")
    tab.wait_for("document.querySelector('#curves button').disabled")
    with tab.page.expect_response(lambda answer: "smooth=0.9" in answer.url) as smoothed:
        tab.page.locator("#curves input[type=range]").fill("0.9")
    assert "smooth" in smoothed.value.json()["curves"].get("loss", {"smooth": 1})
    tab.page.locator("#curves select").select_option("time")
    tab.wait_for(LOSS_POINTS)


def see_comparison(tab):
    tab.open("/")
    for name in ("live", "earlier"):
        tab.page.get_by_label(f"Pick {name} to compare").check()
    tab.page.locator("button", has_text="Compare 2").click()
    tab.page.wait_for_selector("figure[data-metric=loss] .uplot")
    tab.wait_for("document.querySelectorAll('.legend li').length === 2")
    assert "train.global_batch" not in tab.text("section[aria-label=Settings]")
    assert "checkpoint.every" in tab.text("section[aria-label=Settings]")
    assert "lowest loss" in tab.text("section[aria-label=Results]")
