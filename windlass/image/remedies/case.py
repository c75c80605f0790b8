"""A failed build as remedies see it: the recipe, the log, and the instruction that failed. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from windlass.image.build.logs import BuildLog
from windlass.image.read.dockerfile import Instruction
from windlass.image.read.texts import Fix, Texts, fix_from, insert_after
from windlass.image.recipe import Recipe
from windlass.image.read.shell import PipInstall, shell_text

APT = "apt-get update && apt-get install -y --no-install-recommends {} && rm -rf /var/lib/apt/lists/*"


@dataclass(frozen=True)
class Case:
    recipe: Recipe
    log: BuildLog

    @property
    def texts(self) -> Texts:
        return self.recipe.texts

    @property
    def dockerfile(self) -> str:
        return self.texts.dockerfile or ""

    @cached_property
    def failed(self) -> Instruction | None:
        """The instruction that the log says failed; the only RUN where there is one."""
        runs = [one for one in self.recipe.dockerfile.instructions if one.keyword == "RUN"]
        step = " ".join((self.log.step or "").split()).removeprefix("RUN ")
        if step:
            for one in reversed(runs):
                own = " ".join(shell_text(one).split())
                if own == step or one.words == step or (len(step) > 30 and own.startswith(step.rstrip(".")[:60])):
                    return one
        return runs[0] if len(runs) == 1 else None

    @property
    def pip_commands(self) -> list[PipInstall]:
        """The pip commands of the failed instruction; all of them where it is not known."""
        found = [step.install for step in self.recipe.steps]
        own = [one for one in found if self.failed and one.instruction.first == self.failed.first]
        return own or found

    def fix(self, id: str, sentence: str, after: Texts | str, *evidence: str) -> Iterator[Fix]:
        """A fix where it changes anything."""
        texts = self.texts.with_dockerfile(after) if isinstance(after, str) else after
        made = fix_from(self.texts, texts, id, sentence, tuple(evidence))
        if made:
            yield made

    def before_failure(self, line: str) -> str:
        """The Dockerfile with a new instruction before the one that failed, else after the last FROM."""
        if self.failed:
            return insert_after(self.dockerfile, self.failed.first - 1, line)
        start = self.recipe.dockerfile.last
        return insert_after(self.dockerfile, start.start.last if start else 0, line)

    def apt_add(self, packages: list[str], why: str, evidence: str) -> Iterator[Fix]:
        """Install system packages before the step that failed."""
        missing = [one for one in packages if one not in self.recipe.apt_packages]
        if not missing or (self.recipe.base and "alpine" in (self.recipe.base.tag or "")):
            return
        names = " ".join(missing)
        after = self.before_failure(f"RUN {APT.format(names)}")
        yield from self.fix(f"apt-add:{'+'.join(missing)}", f"{why}: install {names}", after, evidence)


Remedy = Callable[[Case], Iterator[Fix]]
