"""Carry the proof into an image, run it there, and read its report."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from typing import Any

from windlass.common.files import parse_record
from windlass.errors import ExitCode, UserError
from windlass.image.build.builders import Builder
from windlass.image.build.job import Proof, Surroundings
from windlass.image.build.logs import stopped
from windlass.image.build.process import capture, last_lines
from windlass.image.registry.reference import ImageReference, is_loopback

# The script comes in on stdin, so that nothing is mounted and a remote daemon works too. /tmp is in every image.
CARRY_IN = (
    "import os, subprocess, sys, tempfile\n"
    "with tempfile.TemporaryDirectory() as folder:\n"
    "    script = os.path.join(folder, 'proof.py')\n"
    "    with open(script, 'wb') as file:\n"
    "        file.write(sys.stdin.buffer.read())\n"
    "    code = subprocess.call([sys.executable, script, sys.argv[1]])\n"
    "sys.exit(code)\n"
)
FIND_PYTHON = 'for name in python python3; do command -v $name >/dev/null && exec $name "$@"; done; exec python3 "$@"'


@dataclass(frozen=True)
class Report:
    """What the image showed."""

    image: str
    values: dict[str, Any]

    @property
    def passed(self) -> bool:
        return bool(self.values["passed"])

    @property
    def failures(self) -> list[dict[str, Any]]:
        return [check for check in self.values["checks"] if check["status"] == "failed"]

    @property
    def log(self) -> str:
        """The failures as text, for the rules that read logs."""
        return "\n".join(
            f"{check['name']}: {check['detail']}\n{check.get('evidence') or ''}" for check in self.failures
        )

    def as_dict(self) -> dict[str, Any]:
        return {"image": self.image, **self.values}


def script() -> str:
    """What is carried into the image."""
    return resources.files("windlass.image.inside").joinpath("proof.py").read_text()


def command_inside(order: str, python: str | None = None) -> list[str]:
    """What is run in the image, with `script` on its stdin."""
    if python:
        return [python, "-c", CARRY_IN, order]
    return ["sh", "-c", FIND_PYTHON, "sh", "-c", CARRY_IN, order]


def fetch(builder: Builder, image: str, *, plain_http: bool = False) -> None:
    """Pull an image that is in a registry and not here."""
    registry = ImageReference.parse(image).registry
    if registry in (None, "localhost") or builder.image_id(image):
        return
    answer = capture(builder.pull(image, plain_http=plain_http or is_loopback(registry)))
    if not answer.succeeded:
        raise stopped(f"{image} cannot be pulled", answer.stderr, answer.stderr.strip()[-400:])


def prove_image(builder: Builder, image: str, proof: Proof, around: Surroundings) -> Report:
    """Run the checks inside the image. A failed check is in the report; what is raised is that there is none."""
    command = command_inside(proof.order(gpus=around.gpus), around.python)
    answer = builder.run(image, command, around, script())
    values = report_in(answer.stdout)
    if values is None:
        raise UserError(
            f"nothing could be run inside {image}",
            evidence=last_lines(answer.stderr) or f"exit code {answer.exit_code}, and no word",
            cause="the image has no python (3.10 or newer), is for another platform, or the container could not start",
            fix="windlass image test --python /path/in/the/image    where python is not on the image's PATH",
            exit_code=ExitCode.FAILED,
        )
    return Report(image, values)


def report_in(output: str) -> dict[str, Any] | None:
    """The report that the proof prints last, whatever the image printed before it."""
    records = (parse_record(line) for line in reversed(output.splitlines()))
    return next((record for record in records if record and "checks" in record), None)
