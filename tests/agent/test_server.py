"""The MCP server through the SDK's own client over stdio, against real runs on this machine. No prose is parsed."""

import json
import os
import sys
from pathlib import Path

import anyio
import pytest
from mcp import Client, MCPError, StdioServerParameters, stdio_client

REPOSITORY = Path(__file__).parents[2]
RUN = (
    "model: {preset: llama-tiny}\n"
    "data: {source: 'corpus:austen', sequence_length: 32}\n"
    "train: {steps: 4000, global_batch: 4, precision: fp32, warmup_steps: 0}\n"
    "resources: {gpus_per_node: 0, processes_per_node: 1}\n"
    "checkpoint: {every: 5}\n"
)


def session(folder, scenario):
    """Run a scenario with a client of a server that works in a folder."""
    environment = {name: value for name, value in os.environ.items() if name != "WINDLASS_RUNS"}
    server = StdioServerParameters(
        command=sys.executable,
        args=["-m", "windlass.cli.main", "agent", "mcp"],
        env={**environment, "PYTHONPATH": str(REPOSITORY)},
        cwd=str(folder),
    )

    async def main():
        async with Client(stdio_client(server)) as client:
            await scenario(client)

    anyio.run(main)


async def tool(client, called, /, *, error=False, **arguments):
    """The structured result of a tool; of a list, the list."""
    answer = await client.call_tool(called, arguments)
    assert bool(answer.is_error) == error, answer
    value = answer.structured_content
    return value["result"] if set(value) == {"result"} else value


@pytest.mark.slow
def test_tools_say_what_they_do_and_nothing_acts_without_a_plan(tmp_path):
    async def scenario(client):
        tools = {one.name: one for one in (await client.list_tools()).tools}
        free = {name for name, one in tools.items() if one.annotations.read_only_hint}
        assert {"list_runs", "why", "watch_run", "plan_run", "plan_cluster"} <= free
        assert {name for name, one in tools.items() if one.annotations.destructive_hint} == {
            "kill_run",
            "delete_runs",
            "prune_checkpoints",
        }
        acting = {
            "start_run",
            "kill_run",
            "delete_runs",
            "prune_checkpoints",
            "create_cluster",
            "fix_cluster",
            "build_image",
            "push_image",
        }
        for name in acting:
            assert list(tools[name].input_schema["properties"]) == ["plan_id"], name
            refused = await tool(client, name, error=True, plan_id="none")
            assert refused["code"] == "no-such-plan"
        for name, one in tools.items():
            assert one.output_schema, name
            assert one.description, name
        written = await tool(client, "write_run_file", run_file="my.yaml", task="pretrain")
        assert written["path"] == "my.yaml"
        estimate = await tool(client, "estimate_run", run_file="my.yaml", overrides=["train.steps=7"])
        assert estimate["resolved"]["train"]["steps"] == 7
        unknown = await tool(client, "show_run", error=True, name="nobody")
        assert (unknown["code"], unknown["exit_code"]) == ("no-such-run", 2)
        assert await tool(client, "list_runs") == []
        with pytest.raises(MCPError) as caught:
            await client.read_resource("windlass://runs/nobody")
        assert json.loads(caught.value.error.message)["code"] == "no-such-run"
        planned = await tool(client, "plan_cluster", name="new", region="us-west-2", instance="p5.48xlarge", nodes=2)
        assert planned["effect"]["usd_per_hour"] > 50
        assert planned["effect"]["created"] is False
        run = await tool(client, "plan_run", run_file="my.yaml")
        (tmp_path / "my.yaml").write_text(RUN)
        changed = await tool(client, "start_run", error=True, plan_id=run["plan_id"])
        assert changed["code"] == "plan-changed"

    session(tmp_path, scenario)


def test_a_plan_is_void_when_its_file_is_gone(tmp_path):
    from windlass.agent.plans import Plans
    from windlass.agent.server import LostWork
    from windlass.errors import UserError

    (tmp_path / "my.yaml").write_text(RUN)
    plans, effect = Plans(), LostWork(step=None, newest_checkpoint=None, steps_lost=None)
    plan = plans.propose("start_run", ["run", "my.yaml"], effect, [str(tmp_path / "my.yaml")])
    (tmp_path / "my.yaml").unlink()
    with pytest.raises(UserError) as caught:
        plans.carry_out("start_run", plan.plan_id, LostWork)
    assert caught.value.error_code == "plan-changed"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("write_run_file", {"run_file": "--force"}),  # would overwrite
        ("check_cluster", {"run_file": "--deep"}),  # would run pods
        ("compare_runs", {"names": ["my", "--plot=loss.png"]}),  # would write a file
    ],
)
def test_a_name_cannot_be_an_option_of_the_command(name, words, tmp_path, monkeypatch):
    from windlass.agent import server

    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama-tiny.yaml").write_text("mine")
    answer = server._with_errors(getattr(server, name))(**words)
    assert (answer.is_error, answer.structured_content["code"]) == (True, "usage")
    assert "is an option" in answer.structured_content["error"]
    assert (tmp_path / "llama-tiny.yaml").read_text() == "mine"


@pytest.mark.train
def test_a_client_trains_watches_kills_asks_why_and_resumes(tmp_path):
    (tmp_path / "small.yaml").write_text(RUN)
    steps_seen = []

    async def seen(progress, total, message):
        steps_seen.append((progress, total))

    async def scenario(client):
        plan = await tool(client, "plan_run", run_file="small.yaml")
        assert plan["effect"]["request"]["request"]["target"] == "local"
        started = await tool(client, "start_run", plan_id=plan["plan_id"])
        again = await tool(client, "start_run", plan_id=plan["plan_id"])  # as a client does that lost the answer
        assert again == started
        answer = await client.call_tool(
            "watch_run", {"name": "small", "until_step": 12, "seconds": 120}, progress_callback=seen
        )
        watched = answer.structured_content
        assert watched["state"] == "running"
        assert watched["step"] >= 12
        assert steps_seen[-1][0] >= 12
        assert steps_seen[-1][1] == 4000

        kill = await tool(client, "plan_kill", name="small")
        assert kill["effect"]["newest_checkpoint"] >= 5
        killed = await tool(client, "kill_run", plan_id=kill["plan_id"])
        assert (killed["was"], killed["state"]) == ("running", "stopped")
        verdict = await tool(client, "why", name="small")
        assert verdict["class"]
        assert verdict["evidence"]

        rows = json.loads((await client.read_resource("windlass://runs/small/checkpoints")).contents[0].text)
        assert max(row["step"] for row in rows if row["complete"]) >= 5
        metrics = json.loads((await client.read_resource("windlass://runs/small/metrics")).contents[0].text)
        end = metrics[-1]["step"] + 3  # fewer than were trained are refused
        plan = await tool(client, "plan_run", run_file="small.yaml", overrides=[f"train.steps={end}"])
        await tool(client, "start_run", plan_id=plan["plan_id"])
        ended = await tool(client, "watch_run", name="small", seconds=120)
        assert (ended["state"], ended["step"]) == ("finished", end)
        metrics = json.loads((await client.read_resource("windlass://runs/small/metrics")).contents[0].text)
        assert metrics[-1]["step"] == end
        assert any(row["event"] == "resumed" for row in ended["history"])

        listed = json.loads((await client.read_resource("windlass://runs")).contents[0].text)
        assert [(run["name"], run["state"]) for run in listed] == [("small", "finished")]
        gone = await tool(client, "plan_deletion", names=["small"])
        assert gone["effect"]["checkpoints"]["small"]
        await tool(client, "delete_runs", plan_id=gone["plan_id"])
        assert not (tmp_path / "runs" / "small").exists()

    session(tmp_path, scenario)
