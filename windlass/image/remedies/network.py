"""Remedies for networks that fail and for disks that fill. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

from windlass.image.read.texts import Fix, lines_of, replace_lines
from windlass.image.remedies.case import Case

PIP_NETWORK = (
    r"Read timed out|ReadTimeoutError|ConnectTimeoutError|NewConnectionError|Connection reset|Connection refused|"
    r"Temporary failure in name resolution|IncompleteRead|Max retries exceeded|Connection broken"
)
APT_NETWORK = (
    r"Temporary failure resolving|Could not resolve|Could not connect to|Connection timed out|Connection failed"
)


def is_network(case: Case) -> bool:
    return bool(case.log.find(PIP_NETWORK))


def retries(case: Case) -> Iterator[Fix]:
    """Downloads that break: more patience, then once the same again."""
    if (found := case.log.find(PIP_NETWORK)) and case.failed:
        part = lines_of(case.dockerfile, case.failed.first, case.failed.last)
        after = re.sub(r"(\bpip[\d.]*\s+install)\b(?! --retries)", r"\1 --retries 10 --timeout 120", part)
        text = replace_lines(case.dockerfile, case.failed.first, case.failed.last, after)
        yield from case.fix("pip-retries", "the package index did not answer: try longer", text, found.line)
    if (found := case.log.find(APT_NETWORK)) and case.failed:
        part = lines_of(case.dockerfile, case.failed.first, case.failed.last)
        after = re.sub(r"(\bapt(?:-get)?)(?=\s+(?:-\S+\s+)*(?:update|install)\b)", r"\1 -o Acquire::Retries=5", part)
        if "Acquire::Retries" not in part:
            text = replace_lines(case.dockerfile, case.failed.first, case.failed.last, after)
            yield from case.fix("apt-retries", "the package archive did not answer: try longer", text, found.line)
    if (found := case.log.find(r"curl: \((?:6|7|18|28|35|52|56)\)")) and case.failed:
        part = lines_of(case.dockerfile, case.failed.first, case.failed.last)
        after = re.sub(r"(?<![\w/-])curl(?=\s+[-'\"h])(?! --retry)", "curl --retry 5 --retry-connrefused", part)
        text = replace_lines(case.dockerfile, case.failed.first, case.failed.last, after)
        yield from case.fix("curl-retries", "a download broke: let curl try again", text, found.line)
    found = case.log.find(
        rf"{PIP_NETWORK}|{APT_NETWORK}|TLS handshake timeout|i/o timeout|unexpected EOF|toomanyrequests|"
        r"early EOF|RPC failed|connect: connection refused"
    )
    if found:  # nothing is changed: what failed may work now
        yield Fix("retry-network-1", "the network failed: the same build again", (found.line,), case.dockerfile)


def disk(case: Case) -> Iterator[Fix]:
    """Copies of packages that the image does not need."""
    found = case.log.find(r"No space left on device|Errno 28")
    if not found:
        return
    text = re.sub(
        r"(\bpip[\d.]*\s+install)\b(?! --no-cache-dir)(?!.*--no-cache-dir)", r"\1 --no-cache-dir", case.dockerfile
    )
    yield from case.fix("no-cache", "the disk is full: keep no copies of what pip downloads", text, found.line)
    for one in case.recipe.apt:
        part = lines_of(case.dockerfile, one.instruction.first, one.instruction.last)
        if "/var/lib/apt/lists" not in part and not one.instruction.heredocs:
            after = part.rstrip() + " && apt-get clean && rm -rf /var/lib/apt/lists/*\n"
            text = replace_lines(case.dockerfile, one.instruction.first, one.instruction.last, after)
            yield from case.fix(
                f"apt-clean:{one.instruction.first}",
                "the disk is full: keep no packages and lists of apt",
                text,
                found.line,
            )
