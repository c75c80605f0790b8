"""The MCP server: windlass's commands as tools and resources, typed like their JSON.

Reading is free. A tool that spends money, loses work or deletes takes a plan's id: `plan_…` says what would happen.
Errors are results too: `isError`, and the same object that the command prints.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable
from typing import Any, Literal

import anyio
import anyio.to_thread
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ResourceError, ResourceNotFoundError
from mcp.types import CallToolResult, TextContent, ToolAnnotations

from windlass import __version__
from windlass.agent.calling import call
from windlass.agent.plans import Plans, Proposal
from windlass.agent.results import Result
from windlass.api.lookup import find
from windlass.api.schemas import clusters, data, images, runs
from windlass.errors import UserError
from windlass.runfolder import RunFolder, steps_of

INSTRUCTIONS = """\
windlass trains PyTorch models from a run file, on this machine, on Slurm and on Kubernetes.
A session: write_run_file → estimate_run → plan_run → (the user agrees) → start_run → watch_run → why, if it failed.
plan_run and start_run again go on from the newest checkpoint. Runs live in ./runs of the working directory."""

POLL_SECONDS = 1.0

PLANS = Plans()


class LostWork(Result):
    """What killing a run loses: the steps after its newest checkpoint."""

    step: int | None
    newest_checkpoint: int | None
    steps_lost: int | None


class RunsToDelete(Result):
    runs: list[runs.ShownRun]
    checkpoints: dict[str, list[data.ListedCheckpoint]]


class RunToStart(Result):
    """The plan of a run, and the request that would be sent."""

    estimate: runs.Plan
    request: runs.DryRun


# Reading


def list_runs(on: str | None = None) -> list[runs.ListedRun]:
    """All runs with their states. `on`: also those that a cluster, `kubernetes[:CONTEXT]`, knows itself."""
    return call(list[runs.ListedRun], "ls", *_on(on))


def show_run(name: str, ranks: bool = False, on: str | None = None) -> runs.ShownRun:
    """Where a run stands, its history, and where its time went; with `ranks`, which rank is slow."""
    return call(runs.ShownRun, "show", name, *(["--ranks"] if ranks else []), *_on(on))


def read_logs(name: str, rank: int | None = None, tail: int = 100, on: str | None = None) -> list[runs.LogLine]:
    """The last lines of each rank, or of one, and of the launcher."""
    return call(
        list[runs.LogLine], "logs", name, "--tail", tail, *(["--rank", rank] if rank is not None else []), *_on(on)
    )


def why(name: str, on: str | None = None) -> runs.WhyResult:
    """Why a job failed, waits or hangs: class, cause, evidence and fix. Also `pod/NAME`, `pytorchjob/NAME`."""
    return call(runs.WhyResult, "why", name, *_on(on))


def list_checkpoints(name: str) -> list[data.ListedCheckpoint]:
    """The checkpoints of a run in all tiers: step, size, complete or not, validation loss."""
    return call(list[data.ListedCheckpoint], "ckpt", "ls", name)


def compare_runs(names: list[str]) -> runs.Comparison:
    """Runs side by side: where their settings differ, and what they came to."""
    return call(runs.Comparison, "compare", *names)


def estimate_run(
    run_file: str,
    overrides: list[str] | None = None,
    gpu: str | None = None,
    instance: str | None = None,
    nodes: int | None = None,
) -> runs.Plan:
    """Ranks, memory of every GPU, tokens per second, hours and dollars of a run. Starts nothing."""
    options = {"--gpu": gpu, "--instance": instance, "--nodes": nodes}
    return call(runs.Plan, "plan", run_file, *(overrides or ()), *_options(options))


def list_presets() -> list[runs.Preset]:
    """The models that a run file may name."""
    return call(list[runs.Preset], "init", "--list")


def run_file_keys(section: str = "") -> list[runs.SchemaKey]:
    """Every key of the run file with type, default and meaning; of one section, `train` say."""
    return [key for key in call(list[runs.SchemaKey], "schema", "--keys") if key.key.startswith(section)]


def examine_machine() -> runs.Examination:
    """Whether this machine can train, and what is missing."""
    return call(runs.Examination, "doctor")


def list_clusters(region: str | None = None, aws: bool = True) -> clusters.ListedClusters:
    """EKS and HyperPod clusters of the AWS account, and contexts of the kubeconfig."""
    return call(
        clusters.ListedClusters, "cluster", "ls", *_options({"--region": region}), *([] if aws else ["--no-aws"])
    )


def check_cluster(run_file: str | None = None, context: str | None = None) -> clusters.CheckedCluster:
    """Whether a cluster can take a run: API, permissions, operators, nodes, devices, room, storage."""
    return call(
        clusters.CheckedCluster,
        "cluster",
        "check",
        *([run_file] if run_file else []),
        *_options({"--context": context}),
    )


async def watch_run(
    name: str, context: Context[Any, Any], until_step: int | None = None, seconds: float = 60
) -> runs.ShownRun:
    """Wait until a run has ended, has reached a step, or some seconds are over. Steps come as progress."""
    target, job = await anyio.to_thread.run_sync(find, name)
    end, last = time.monotonic() + seconds, -1
    while True:
        status = await anyio.to_thread.run_sync(target.status, job)
        step = status.step or 0
        if step > last:
            await context.report_progress(step, status.steps, f"loss {status.loss}" if status.loss else status.state)
            last = step
        if status.ended or (until_step is not None and step >= until_step) or time.monotonic() > end:
            return await anyio.to_thread.run_sync(show_run, name)
        await anyio.sleep(POLL_SECONDS)


# Writing that costs nothing and loses nothing


def write_run_file(
    run_file: str,
    task: Literal["pretrain", "chat", "lora", "dpo"] = "pretrain",
    preset: str | None = None,
    model: str | None = None,
    data_source: str | None = None,
) -> runs.InitResult:
    """Write a run file to start from. One that is there is not overwritten."""
    options = {"--task": task, "--preset": preset, "--model": model, "--data": data_source}
    return call(runs.InitResult, "init", run_file, *_options(options))


def stop_run(name: str, on: str | None = None) -> runs.StopResult:
    """Save a checkpoint and stop a run; it goes on from there when it is started again."""
    return call(runs.StopResult, "stop", name, *_on(on))


def export_checkpoint(name: str, step: int | None = None, to: str | None = None) -> data.Exported:
    """Write a Hugging Face folder from a checkpoint."""
    return call(data.Exported, "ckpt", "export", name, *_options({"--step": step, "--to": to}))


# Plans, and what they allow


def plan_run(
    run_file: str, overrides: list[str] | None = None, on: str | None = None, nodes: int | None = None
) -> Proposal[RunToStart]:
    """What starting a run, or going on with one, would need, cost and send. For start_run."""
    words = [run_file, *(overrides or ()), *_options({"--on": on, "--nodes": nodes})]
    estimate = call(runs.Plan, "plan", run_file, *(overrides or ()), *_options({"--nodes": nodes}))
    effect = RunToStart(estimate=estimate, request=call(runs.DryRun, "run", *words, "--dry-run"))
    return PLANS.propose("start_run", ["run", *words, "--detach"], effect, [run_file])


def start_run(plan_id: str) -> runs.RunResult:
    """Start what plan_run showed. It goes on by itself; watch_run follows it."""
    return PLANS.carry_out("start_run", plan_id, runs.RunResult)


def plan_kill(name: str) -> Proposal[LostWork]:
    """What killing a run at once would lose. For kill_run; stop_run saves first and loses nothing."""
    shown = show_run(name)
    complete = [row.step for row in list_checkpoints(name) if row.complete]
    newest = max(complete, default=None)
    lost = shown.step - (newest or 0) if shown.step is not None else None
    effect = LostWork(step=shown.step, newest_checkpoint=newest, steps_lost=lost)
    return PLANS.propose("kill_run", ["stop", name, "--now"], effect)


def kill_run(plan_id: str) -> runs.StopResult:
    """Kill the run that plan_kill showed."""
    return PLANS.carry_out("kill_run", plan_id, runs.StopResult)


def plan_deletion(names: list[str]) -> Proposal[RunsToDelete]:
    """What deleting runs would delete. For delete_runs."""
    effect = RunsToDelete(
        runs=[show_run(name) for name in names], checkpoints={name: list_checkpoints(name) for name in names}
    )
    return PLANS.propose("delete_runs", ["rm", *names, "--yes"], effect)


def delete_runs(plan_id: str) -> list[runs.RemovedRun]:
    """Delete the runs that plan_deletion showed, with their checkpoints."""
    return PLANS.carry_out("delete_runs", plan_id, list[runs.RemovedRun])


def plan_pruning(name: str, keep: int | None = None) -> Proposal[data.Pruned]:
    """Which checkpoints of a run would be deleted. For prune_checkpoints."""
    words = ["ckpt", "prune", name, *_options({"--keep": keep})]
    effect = call(data.Pruned, *words, "--dry-run")
    return PLANS.propose("prune_checkpoints", [*words, "--yes"], effect)


def prune_checkpoints(plan_id: str) -> data.Pruned:
    """Delete the checkpoints that plan_pruning showed."""
    return PLANS.carry_out("prune_checkpoints", plan_id, data.Pruned)


def plan_cluster(
    name: str, region: str, instance: str = "m6i.2xlarge", nodes: int = 2, spot: bool = False
) -> Proposal[clusters.CreatedCluster]:
    """What an EKS cluster would be made of, and its price per hour. For create_cluster."""
    words = ["cluster", "create", name, "--region", region, "--instance", instance, "--nodes", nodes]
    words += ["--spot"] if spot else []
    effect = call(clusters.CreatedCluster, *words, "--dry-run")
    return PLANS.propose("create_cluster", [*words, "--yes"], effect)


def create_cluster(plan_id: str) -> clusters.CreatedCluster:
    """Make the cluster that plan_cluster showed. It costs money from then on."""
    return PLANS.carry_out("create_cluster", plan_id, clusters.CreatedCluster)


def plan_cluster_fix(run_file: str, context: str | None = None) -> Proposal[clusters.CheckedCluster]:
    """What is missing in a cluster for a run. For fix_cluster, which makes what windlass can make."""
    effect = check_cluster(run_file, context)
    words = ["cluster", "fix", run_file, *_options({"--context": context}), "--yes"]
    return PLANS.propose("fix_cluster", words, effect, [run_file])


def fix_cluster(plan_id: str) -> clusters.FixedCluster:
    """Make what plan_cluster_fix found missing; nothing that is there is changed."""
    return PLANS.carry_out("fix_cluster", plan_id, clusters.FixedCluster)


def plan_image_build(run_file: str) -> Proposal[images.BuildRequest]:
    """The Dockerfile and the command or CodeBuild request that would build the image of a run file. For build_image."""
    words = ["image", "build", run_file, "--auto-fix"]
    return PLANS.propose("build_image", words, call(images.BuildRequest, *words, "--dry-run"), [run_file])


def build_image(plan_id: str) -> images.BuiltImage:
    """Build the image that plan_image_build showed, healed where it fails, and prove it from inside."""
    return PLANS.carry_out("build_image", plan_id, images.BuiltImage)


def plan_image_push(run_file: str) -> Proposal[images.PushRequest]:
    """Where the newest built image of a run file would go. For push_image."""
    words = ["image", "push", run_file]
    return PLANS.propose("push_image", words, call(images.PushRequest, *words, "--dry-run"), [run_file])


def push_image(plan_id: str) -> images.PushedImage:
    """Push the image that plan_image_push showed, and pin the run file to its digest."""
    return PLANS.carry_out("push_image", plan_id, images.PushedImage)


READING = (
    *(list_runs, show_run, read_logs, why, list_checkpoints, compare_runs, estimate_run, list_presets, run_file_keys),
    *(examine_machine, list_clusters, check_cluster, watch_run),
    *(plan_run, plan_kill, plan_deletion, plan_pruning, plan_cluster, plan_cluster_fix),
    *(plan_image_build, plan_image_push),
)
WRITING = (write_run_file, stop_run, export_checkpoint, start_run, create_cluster, fix_cluster, build_image, push_image)
DESTROYING = (kill_run, delete_runs, prune_checkpoints)


def make_server() -> MCPServer:
    server = MCPServer("windlass", instructions=INSTRUCTIONS, version=__version__)
    for tools, hints in (
        (READING, ToolAnnotations(read_only_hint=True)),
        (WRITING, ToolAnnotations(read_only_hint=False, destructive_hint=False, idempotent_hint=True)),
        (DESTROYING, ToolAnnotations(read_only_hint=False, destructive_hint=True, idempotent_hint=True)),
    ):
        for tool in tools:
            server.add_tool(_with_errors(tool), annotations=hints)
    for path, read, description in RESOURCES:
        server.resource(f"windlass://runs{path}", description=description, mime_type="application/json")(read)
    return server


# Resources


def _all_runs() -> str:
    return _json(lambda: [run.model_dump(mode="json") for run in list_runs()])


def _run(name: str) -> str:
    return _json(lambda: show_run(name).model_dump(mode="json"))


def _logs(name: str) -> str:
    return _json(lambda: [line.model_dump(mode="json") for line in read_logs(name, tail=1000)])


def _metrics(name: str) -> str:
    return _json(lambda: list(steps_of(RunFolder.find(name)).values()))


def _checkpoints(name: str) -> str:
    return _json(lambda: [row.model_dump(mode="json") for row in list_checkpoints(name)])


RESOURCES: tuple[tuple[str, Callable[..., str], str], ...] = (
    ("", _all_runs, "All runs with their states."),
    ("/{name}", _run, "Where a run stands, and its history."),
    ("/{name}/logs", _logs, "The last thousand lines of each rank."),
    ("/{name}/metrics", _metrics, "One record per step (docs/metrics.md)."),
    ("/{name}/checkpoints", _checkpoints, "Checkpoints in all tiers."),
)


def _json(read: Callable[[], Any]) -> str:
    try:
        return json.dumps(read())
    except UserError as error:
        missing = error.error_code == "no-such-run"
        raise (ResourceNotFoundError if missing else ResourceError)(json.dumps(error.as_dict())) from None


# What tools share


def _with_errors(tool: Callable[..., Any]) -> Callable[..., Any]:
    """The tool, with a UserError as a result that a program can read."""
    if tool is watch_run:

        @functools.wraps(tool)
        async def asynchronous(*arguments: Any, **named: Any) -> Any:
            try:
                _refuse_options(named)
                return await tool(*arguments, **named)
            except UserError as error:
                return _failed(error)

        return asynchronous

    @functools.wraps(tool)
    def synchronous(*arguments: Any, **named: Any) -> Any:
        try:
            _refuse_options(named)
            return tool(*arguments, **named)
        except UserError as error:
            return _failed(error)

    return synchronous


def _refuse_options(named: dict[str, Any]) -> None:
    """A name or a path becomes a word of a command: as an option it would do what the tool does not say."""
    words = [word for value in named.values() for word in (value if isinstance(value, list) else [value])]
    for word in words:
        if isinstance(word, str) and word.startswith("-"):
            raise UserError(
                f"{word!r} is an option, and no name",
                fix="a name or a path, without a dash before it",
                error_code="usage",
            )


def _failed(error: UserError) -> CallToolResult:
    return CallToolResult(
        content=[TextContent(type="text", text=str(error))], structured_content=error.as_dict(), is_error=True
    )


def _on(place: str | None) -> list[str]:
    return _options({"--on": place})


def _options(values: dict[str, Any]) -> list[str]:
    return [word for option, value in values.items() if value is not None for word in (option, str(value))]
