"""`windlass plot`: a curve of one or several runs as an SVG or PNG file."""

from __future__ import annotations

from pathlib import Path

import click

from windlass.cli.jobs import json_option, run_names
from windlass.cli.output import print_json
from windlass.common.files import write_output
from windlass.errors import UserError
from windlass.runfolder import RunFolder
from windlass.ui.figure import draw
from windlass.ui.report import chart_of, read_view
from windlass.ui.runs import TITLES

AXES = {"step": "step", "tokens": "tokens", "time": "time (UTC)"}
# Tried in this order: a machine without any of them has no letters to draw with.
FAMILIES = ("DejaVu Sans", "Liberation Sans", "Noto Sans", "Helvetica", "Arial", "Ubuntu", "Cantarell")


@click.command(short_help="Draw curves of runs to an image.")
@click.argument("names", nargs=-1, required=True, metavar="RUN...", shell_complete=run_names)
@click.option(
    "--output", "-o", type=click.Path(path_type=Path, dir_okay=False), required=True, help="FILE.svg or .png."
)
@click.option("--metric", type=click.Choice(tuple(TITLES)), default="loss", help="Default: loss.")
@click.option("--over", "axis", type=click.Choice(tuple(AXES)), default="step", help="Default: step.")
@click.option(
    "--smooth", type=click.FloatRange(0, 0.9999), default=0.0, help="Weight of an exponential average, 0.9 say."
)
@click.option("--log", "logarithmic", is_flag=True, help="A logarithmic scale.")
@click.option("--size", default="800x450", metavar="WxH", help="Default: 800x450; a PNG has twice as many pixels.")
@json_option
def plot(
    names: tuple[str, ...],
    output: Path,
    metric: str,
    axis: str,
    smooth: float,
    logarithmic: bool,
    size: str,
    as_json: bool,
) -> None:
    """Draw curves of runs to an image.

    For papers and pull requests. SVG is written without any library; PNG needs `pip install 'windlass[ui]'`.
    """
    folders = [RunFolder.find(name) for name in names]
    written = write_plot(
        folders, output, metric=metric, axis=axis, smooth=smooth, logarithmic=logarithmic, size=_size(size)
    )
    runs = [folder.name for folder in folders]
    if as_json:
        print_json({"path": str(output), "runs": runs, "bytes": written})
    else:
        click.echo(f"{output}: {metric} of {', '.join(runs)}")


def write_plot(
    folders: list[RunFolder],
    output: Path,
    *,
    metric: str = "loss",
    axis: str = "step",
    smooth: float = 0.0,
    logarithmic: bool = False,
    size: tuple[int, int] = (800, 450),
) -> int:
    """Draw a metric of some runs into a file; returns its size in bytes."""
    if output.suffix not in (".svg", ".png"):
        raise UserError(f"{output} is neither an .svg nor a .png file", fix="loss.svg")
    views = [(folder.name, read_view(folder)) for folder in folders]
    chart = chart_of(views, metric, axis=axis, axis_label=AXES[axis], smooth=smooth, logarithmic=logarithmic)
    if not any(curve.xs for curve in chart.curves):
        names = ", ".join(folder.name for folder in folders)
        raise UserError(f"there is no {metric} in {names} to draw", fix=f"windlass show {folders[0].name}")
    svg = draw(chart, width=size[0], height=size[1], background="#ffffff").replace("currentColor", "#20262c")
    content = svg.encode() if output.suffix == ".svg" else _png(svg)
    write_output(output, content)
    return len(content)


def _size(text: str) -> tuple[int, int]:
    width, _, height = text.partition("x")
    if not (width.isdecimal() and height.isdecimal() and 200 <= int(width) <= 8000 and 150 <= int(height) <= 8000):
        raise UserError(f"--size {text} is not of the form WIDTHxHEIGHT", fix="--size 800x450")
    return int(width), int(height)


def _png(svg: str) -> bytes:
    """Through resvg: one small wheel with nothing behind it, where matplotlib brings eleven packages."""
    try:
        from resvg_py import svg_to_bytes
    except ModuleNotFoundError:
        raise UserError(
            "PNG needs resvg, which is not installed", fix="pip install 'windlass[ui]'    or -o FILE.svg"
        ) from None
    empty = "<svg xmlns='http://www.w3.org/2000/svg' width='20' height='20'>{}</svg>"
    blank = svg_to_bytes(svg_string=empty.format(""))
    for family in FAMILIES:
        letter = f"<text x='2' y='16' font-family='{family}'>x</text>"
        if svg_to_bytes(svg_string=empty.format(letter)) != blank:
            return bytes(svg_to_bytes(svg_string=svg.replace("DejaVu Sans,", f"{family},"), zoom=2))
    raise UserError(
        "this machine has no fonts: a PNG would have no numbers",
        fix="-o FILE.svg    or apt-get install fonts-dejavu-core",
    )
