"""Slurm's commands, called here or on a login node over SSH; every way in which they fail is one UserError."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from windlass.errors import NoAnswerError, UserError

SSH_VARIABLE = "WINDLASS_SSH"  # another ssh program or options, `ssh -F file` say, as GIT_SSH_COMMAND is for git
TIMEOUT_SECONDS = 60.0  # while the controller is down, Slurm's commands wait for minutes
CONNECT_SECONDS = 15
SSH_FAILED = 255
NOT_FOUND = 127
WITHOUT_SLURM = (
    "--on slurm:LOGIN_NODE      goes through a login node, over SSH; target.host=LOGIN_NODE says the same\n"
    "--dry-run --offline        of `windlass run` prints the job without asking Slurm\n"
    "--on local                 trains on this machine"
)
CONTROLLER_GONE = ("Unable to contact slurm controller", "Connection refused", "configuration source")
# Variables that change what Slurm's commands do or what a job inherits: options of sbatch, filters of squeue, and the
# facts of the job that windlass itself may run in. Where the cluster is, and how to prove who asks, stays.
INHERITED = r"(SBATCH|SLURM|SQUEUE|SINFO|SACCT|SCANCEL|SCONTROL)_[A-Za-z0-9_]*"
KEPT = r"SLURM_(CONF|CLUSTERS|JWT|SACK)[A-Za-z0-9_]*"
_CLEAN_THERE = f"unset $(env | sed -n -E '/^{KEPT}=/d; s/^({INHERITED})=.*/\\1/p') WINDLASS_NOTHING; exec \"$@\""


class SilentError(NoAnswerError):
    """Slurm is there, and its answer did not arrive. What it was asked to do may have happened, if the request did."""

    may_have_acted = True


@dataclass(frozen=True)
class Answer:
    code: int
    out: str
    err: str

    @property
    def complaint(self) -> str:
        """What the command had to say against it, in its own words."""
        lines = [line.strip() for line in (self.err or self.out).splitlines() if line.strip()]
        return "\n".join(line.partition(": error: ")[2] or line for line in lines[-3:])


@dataclass(frozen=True)
class Commands:
    """Where Slurm's commands are."""

    host: str | None = None

    def call(self, *argv: str, text: str | None = None, timeout: float = TIMEOUT_SECONDS) -> Answer:
        """Run one command; raises if it could not be run or found no controller. Its own refusals are the caller's."""
        if not self.host and shutil.which(argv[0]) is None:
            raise NoAnswerError(
                f"there is no {argv[0]} here",
                cause="Slurm's commands are not installed, or not on PATH",
                fix=WITHOUT_SLURM,
            )
        try:
            done = subprocess.run(
                self._command(argv),
                input=text if text is not None else "",
                capture_output=True,
                encoding="utf-8",
                errors="replace",  # a login banner may be in any encoding
                timeout=timeout,
                check=False,
                env=without_options(os.environ),
            )
        except subprocess.TimeoutExpired:
            raise SilentError(
                f"{argv[0]} did not answer within {timeout:.0f} s{self._there}",
                cause="Slurm's controller is down, or the network is",
            ) from None
        except FileNotFoundError:
            raise UserError("there is no ssh here", fix="install an OpenSSH client") from None
        answer = Answer(done.returncode, done.stdout, done.stderr)
        if self.host:
            self._check_ssh(argv, answer)
        if answer.code != 0 and any(sign in answer.err for sign in CONTROLLER_GONE):
            silent = SilentError(f"Slurm does not answer{self._there}", evidence=answer.complaint, fix=WITHOUT_SLURM)
            silent.may_have_acted = False  # nobody took the connection
            raise silent
        return answer

    def must(self, *argv: str) -> str:
        """The output of a command that has to work."""
        answer = self.call(*argv)
        if answer.code != 0:
            raise UserError(f"{argv[0]} failed{self._there}", evidence=answer.complaint)
        return answer.out

    @property
    def _there(self) -> str:
        return f" on {self.host}" if self.host else ""

    def _command(self, argv: Sequence[str]) -> list[str]:
        if not self.host:
            return list(argv)
        if self.host.startswith("-"):
            raise UserError(f"target.host {self.host!r} is no host name", fix="target.host=LOGIN_NODE")
        ssh = shlex.split(os.environ.get(SSH_VARIABLE) or "ssh")
        # never a question for a password: nobody may be there to answer it
        options = ("-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_SECONDS}")
        # what a login shell sets there, nobody can leave out here
        return [*ssh, *options, self.host, "--", shlex.join(["sh", "-c", _CLEAN_THERE, "sh", *argv])]

    def _check_ssh(self, argv: Sequence[str], answer: Answer) -> None:
        if answer.code == SSH_FAILED:
            raise SilentError(
                f"{self.host} cannot be reached over SSH",
                evidence=answer.complaint,
                fix=f"ssh {self.host} true    must work without a question",
            )
        if answer.code == NOT_FOUND:
            raise UserError(
                f"there is no {argv[0]} on {self.host}",
                evidence=answer.complaint,
                fix="target.host=…, a login node of the cluster",
            )


def without_options(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without the variables that would override a run file, or stand for another job's facts."""
    return {
        name: value
        for name, value in environment.items()
        if not re.fullmatch(INHERITED, name) or re.fullmatch(KEPT, name)
    }


def ignored_options(environment: Mapping[str, str]) -> list[str]:
    """The sbatch options that somebody set by variables; a run takes none of them."""
    return sorted(name for name in environment if name.startswith("SBATCH_"))
