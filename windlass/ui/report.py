"""One run as one HTML file to send: curves, time line, run file, hardware, goodput, failures. No script, no link."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from html import escape
from typing import Any

from windlass import __version__
from windlass.diagnose.secrets import clean_text
from windlass.runfolder import RunFolder
from windlass.ui.figure import Chart, Curve, draw
from windlass.ui.library import Sources, end_of_row
from windlass.ui.runs import TITLES, RunView, checkpoints_of

POINTS = 1200
MOST_EVENTS = 200
STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; }
body { max-width: 1000px; margin: 0 auto; padding: 24px; background: light-dark(#fbfaf7, #14171a); color: light-dark(#20262c, #e4e7ea); }
h1 { margin: 0; } h2 { font-size: 1.05rem; margin: 32px 0 8px; }
.soft { color: light-dark(#59636d, #9aa5b0); }
table { border-collapse: collapse; width: 100%; } td, th { text-align: left; padding: 4px 12px 4px 0; border-bottom: 1px solid light-dark(#e4e1da, #2b3138); vertical-align: top; }
th { font-weight: 550; color: light-dark(#59636d, #9aa5b0); white-space: nowrap; }
pre { overflow: auto; white-space: pre-wrap; overflow-wrap: anywhere; font-size: 12.5px; background: light-dark(#fff, #1b1f23); border: 1px solid light-dark(#e4e1da, #2b3138); border-radius: 8px; padding: 12px; }
.bad { border-left: 4px solid #b3261e; padding-left: 14px; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 440px), 1fr)); gap: 12px; }
.charts div { background: light-dark(#fff, #1b1f23); border: 1px solid light-dark(#e4e1da, #2b3138); border-radius: 10px; padding: 8px; }
.charts .wide { grid-column: 1 / -1; } svg { width: 100%; height: auto; display: block; }
@media print { body { background: none; } }
"""  # noqa: E501

Rows = Iterable[tuple[str, object]]


def read_view(folder: RunFolder, sources: Sources | None = None) -> RunView:
    """A run's folder, read to its end."""
    view = RunView(folder, sources.describe if sources else lambda record: None)
    view.refresh(math.inf)
    return view


def chart_of(
    views: Sequence[tuple[str, RunView]],
    metric: str,
    *,
    axis: str = "step",
    axis_label: str = "step",
    smooth: float = 0.0,
    logarithmic: bool = False,
    most_points: int = POINTS,
) -> Chart:
    """One metric of some runs; with `smooth` what was measured stays faintly visible behind the average."""
    curves: list[Curve] = []
    for index, (name, view) in enumerate(views):
        column = metric.removeprefix("validation_")
        is_validation = column != metric
        series = view.validation if is_validation else view.steps
        rows = (0, len(series))
        xs, ys = series.thinned(column, axis, rows, most_points)
        is_smooth = bool(smooth) and not is_validation
        curves.append(Curve("" if is_smooth else name, xs, ys, index, faint=is_smooth, dots=is_validation))
        if is_smooth:
            curves.append(Curve(name, *series.smoothed(column, axis, rows, most_points // 2, smooth), colour=index))
    title = TITLES[metric] + (f" of {views[0][0]}" if len(views) == 1 and curves[0].label else "")
    marks = _restarts(views[0][1], axis) if len(views) == 1 else ()
    return Chart(title, curves, axis_label, axis == "time", logarithmic, marks)


def _restarts(view: RunView, axis: str) -> list[float]:
    begun = [attempt.first_step for attempt in view.attempts.values() if attempt.first_step is not None][1:]
    positions = view.steps.axis(axis)
    rows = [view.steps.rows_between("step", step, None)[0] for step in begun]
    return [float(positions[row]) for row in rows if row < len(positions)]


def report(folder: RunFolder, sources: Sources) -> str:
    """The page. Secrets are removed from what a run file, a log or an error may hold of them."""
    view, row = read_view(folder, sources), sources.row(folder)
    end = end_of_row(folder, row)
    sections = [
        _heading(folder, row),
        _verdict(sources.verdict(folder, end)) if row.get("state") == "failed" else "",
        _section("Results", _table(_results(row, sources.summary(folder), sources.goodput(folder)))),
        _evaluations(sources.evaluations(folder)),
        _section("Curves", _charts(folder.name, view)),
        _section("Time line", _timeline(view, end)),
        _section("Checkpoints", _checkpoints(folder)),
        _section("Hardware", _table(_hardware(folder, view))),
        _section("Run file", f"<pre>{_safe(_run_file(folder))}</pre>"),
    ]
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{_safe(folder.name)} · windlass</title><style>{STYLE}</style></head>\n"
        f"<body>\n{''.join(sections)}\n</body></html>\n"
    )


def _heading(folder: RunFolder, row: Mapping[str, Any]) -> str:
    written = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    reason = f"<p>{_safe(row['reason'])}</p>" if row.get("reason") else ""
    about = f"{row.get('state')} · written {written} by windlass {__version__}"
    return f"<h1>{_safe(folder.name)}</h1><p class='soft'>{_safe(about)}</p>{reason}"


def _verdict(verdict: Mapping[str, Any]) -> str:
    evidence = "".join(f"<pre>{_safe(proof['line'])}</pre>" for proof in verdict.get("evidence", ()))
    rows = [("cause", verdict.get("cause")), ("fix", verdict.get("fix")), ("how sure", verdict.get("why"))]
    return f"<section class='bad'><h2>Why it failed</h2>{_table(rows)}{evidence}</section>"


def _results(row: Mapping[str, Any], summary: Mapping[str, Any], goodput: float | None) -> Rows:
    yield "steps", f"{row.get('step') or 0} of {row.get('steps') or '–'}"
    for key in ("loss", "validation_loss", "tokens_per_s"):
        yield key.replace("_per_s", "/s").replace("_", " "), _number(summary.get(key))
    yield "tokens", _number(summary.get("tokens"))
    yield "goodput", "–" if goodput is None else f"{goodput:.1%} of the time trained steps that count"
    yield "restarts", summary.get("restarts")
    yield "steps repeated", summary.get("steps_repeated")


def _evaluations(tasks: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        (
            f"{task['task']}, {task['metric']}" + (f" ({task['filter']})" if task["filter"] else ""),
            _number(task["value"])
            + (f" ± {_number(task['stderr'])}" if task["stderr"] is not None else "")
            + (f" at step {task['step']}" if task["step"] is not None else "")
            + (f", {task['samples']:,} examples" if task["samples"] else ""),
        )
        for task in tasks
    ]
    return _section("Evaluations", _table(rows)) if rows else ""


def _charts(name: str, view: RunView) -> str:
    drawn = []
    for metric, title in TITLES.items():
        width, height = (940, 340) if metric == "loss" else (460, 240)
        chart = chart_of([(name, view)], metric, most_points=width)
        if any(y for curve in chart.curves for y in curve.ys):
            picture = draw(replace(chart, title=title), width=width, height=height)
            drawn.append(f"<div class='{'wide' if metric == 'loss' else 'narrow'}'>{picture}</div>")
    return f"<div class='charts'>{''.join(drawn)}</div>" if drawn else "<p>No steps were trained.</p>"


def _timeline(view: RunView, end: Mapping[str, Any] | None) -> str:
    events = [event for event in view.shown_events(end) if event["tone"] != "save"]
    left_out = (
        f"<p class='soft'>{len(events) - MOST_EVENTS} earlier ones are left out.</p>"
        if len(events) > MOST_EVENTS
        else ""
    )
    return left_out + _table((_moment(event["time"]), event["text"]) for event in events[-MOST_EVENTS:])


def _checkpoints(folder: RunFolder) -> str:
    rows = [
        (
            f"step {row['step']}, {row['tier']}",
            f"{'' if row['complete'] else 'not '}complete, {row['bytes'] / 2**20:,.1f} MiB",
        )
        for row in checkpoints_of(folder)
    ]
    return _table(rows) if rows else "<p>None in the run folder.</p>"


def _hardware(folder: RunFolder, view: RunView) -> Rows:
    try:
        run = folder.load_run()
    except Exception:  # a run file of another version: its text follows all the same
        return
    yield "target", run.target.kind
    yield "nodes", run.resources.nodes
    yield "instance", run.resources.instance or "–"
    yield "GPUs per node", run.resources.gpus_per_node or "none"
    yield "ranks", view.num_ranks or "–"
    hosts = sorted(set(view.ranks.hosts.values()))
    yield "hosts", ", ".join(hosts[:32]) or "–"
    yield "model", run.model.label
    yield "precision", run.train.precision


def _run_file(folder: RunFolder) -> str:
    """What is set in it: keys that are null fill three screens and say nothing."""
    try:
        text = folder.run_file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "it cannot be read"
    return "\n".join(line for line in text.splitlines() if not line.endswith(": null"))


def _section(title: str, body: str) -> str:
    return f"<section><h2>{title}</h2>{body}</section>\n"


def _table(rows: Rows) -> str:
    cells = "".join(f"<tr><th>{_safe(name)}</th><td>{_safe(value)}</td></tr>" for name, value in rows)
    return f"<table>{cells}</table>"


def _safe(value: object) -> str:
    return escape(clean_text(str(value)))


def _number(value: object) -> str:
    if not isinstance(value, int | float):
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _moment(when: float | None) -> str:
    return "–" if when is None else datetime.fromtimestamp(when, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
