"""What is installed in the image, by the records of pip, dpkg and rpm."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Iterator
from typing import Any


def inventory() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "system": os_release(),
        "pypi": sorted(python_packages(), key=lambda one: (one["name"].lower(), one["version"])),
        "debian": sorted(debian_packages(), key=lambda one: (one["name"], one["architecture"])),
        "rpm": sorted(rpm_packages(), key=lambda one: (one["name"], one["version"])),
    }


def installed_names() -> list[str]:
    return sorted({one["name"].lower() for one in python_packages()})


def python_packages() -> Iterator[dict[str, str]]:
    seen = set()
    for one in importlib.metadata.distributions():
        name, version = one.metadata["Name"], one.version or ""
        if not name or (name.lower(), version) in seen:
            continue
        seen.add((name.lower(), version))
        said = [*(one.metadata.get_all("License-Expression") or ()), *(one.metadata.get_all("License") or ()), ""]
        text = said[0]
        # Some packages put the whole text of their licence there.
        yield {"name": name, "version": version, "license": text if len(text) < 100 and "\n" not in text else ""}


def debian_packages() -> Iterator[dict[str, str]]:
    try:
        with open("/var/lib/dpkg/status", encoding="utf-8") as file:
            records = file.read().split("\n\n")
    except OSError:
        return
    for record in records:
        fields = dict(re.findall(r"^([\w-]+): (.*)$", record, re.M))
        if fields.get("Status", "").endswith(" installed"):
            yield {key.lower(): fields.get(key, "") for key in ("Version", "Architecture")} | {
                "name": fields["Package"]
            }


def rpm_packages() -> Iterator[dict[str, str]]:
    if not os.path.isdir("/var/lib/rpm") and not os.path.isdir("/usr/lib/sysimage/rpm"):
        return
    command = ["rpm", "-qa", "--qf", "%{NAME} %{VERSION}-%{RELEASE} %{ARCH}\\n"]
    try:
        text = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return
    for line in text.splitlines():
        name, version, architecture = line.split(" ")
        yield {"name": name, "version": version, "architecture": architecture}


def os_release() -> dict[str, str]:
    try:
        with open("/etc/os-release") as file:
            return {key: value.strip('"') for key, value in re.findall(r"^(\w+)=(.*)$", file.read(), re.M)}
    except OSError:
        return {}
