"""What a check of a cluster found: pass, warn, fail or skip, with the evidence and the way out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal
from xml.etree import ElementTree

Status = Literal["pass", "warn", "fail", "skip"]
GRAVITY: Sequence[Status] = ("skip", "pass", "warn", "fail")


@dataclass(frozen=True)
class Result:
    """One finding of one check. A check that looks at several things yields several."""

    check: str
    status: Status
    summary: str
    evidence: str | None = None
    fix: str | None = None


# What a check yields; `named` writes its name in.
passed, warning, failed, skipped = (partial(Result, "", status) for status in ("pass", "warn", "fail", "skip"))


def named(check: str, results: Iterable[Result]) -> list[Result]:
    return [replace(result, check=check) for result in results]


def overall(results: Iterable[Result]) -> Status:
    """The gravest status; what was skipped weighs nothing."""
    return max((result.status for result in results), key=GRAVITY.index, default="skip")


def junit(results: Sequence[Result], *, cluster: str, seconds: float) -> str:
    """The results as the JUnit XML that CI servers read. Warnings pass, with their text as output."""
    suite = ElementTree.Element(
        "testsuite",
        name=_xml(f"windlass cluster check {cluster}"),
        tests=str(len(results)),
        failures=str(sum(result.status == "fail" for result in results)),
        skipped=str(sum(result.status == "skip" for result in results)),
        errors="0",
        time=f"{seconds:.3f}",
    )
    for result in results:
        case = ElementTree.SubElement(suite, "testcase", classname=result.check, name=_xml(result.summary))
        details = _xml("\n".join(filter(None, (result.summary, result.evidence, result.fix and f"fix: {result.fix}"))))
        if result.status == "fail":
            ElementTree.SubElement(case, "failure", message=_xml(result.summary)).text = details
        elif result.status == "skip":
            ElementTree.SubElement(case, "skipped", message=_xml(result.evidence or result.summary))
        else:
            ElementTree.SubElement(case, "system-out").text = details
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def _xml(text: str) -> str:
    """Text without the characters that XML 1.0 cannot hold: a cluster's messages may have any."""
    return re.sub("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "", text)
