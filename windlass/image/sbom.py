"""The bill of materials of an image: what was found installed in it, as CycloneDX or SPDX. Pure."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import quote

from windlass import __version__

FORMATS = ("cyclonedx", "spdx")
NAMESPACE = uuid.UUID("6f0e5b86-7a5e-5d0c-9a43-0d5f5f0c1b11")  # of our own: names become the same ids every time


class Component(NamedTuple):
    name: str
    version: str
    purl: str
    license: str


def bill_of_materials(
    inventory: dict[str, Any], *, image: str, digest: str, format: str = "cyclonedx"
) -> dict[str, Any]:
    """The same inventory gives the same document, so that two builds can be compared by it."""
    parts = list(components(inventory))
    return _spdx(parts, image, digest) if format == "spdx" else _cyclonedx(parts, image, digest)


def components(inventory: dict[str, Any]) -> Iterator[Component]:
    yield Component("python", inventory["python"], f"pkg:generic/python@{inventory['python']}", "")
    for one in inventory["pypi"]:
        name = one["name"].lower().replace("_", "-")
        yield Component(one["name"], one["version"], f"pkg:pypi/{name}@{quote(one['version'])}", one["license"])
    system = inventory["system"].get("ID", "linux")
    for kind, key in (("deb", "debian"), ("rpm", "rpm")):
        for one in inventory[key]:
            version = quote(one["version"], safe="")
            purl = f"pkg:{kind}/{system}/{quote(one['name'])}@{version}?arch={one['architecture']}"
            yield Component(one["name"], one["version"], purl, "")


def _cyclonedx(parts: list[Component], image: str, digest: str) -> dict[str, Any]:
    listed = []
    for part in parts:
        one: dict[str, Any] = {"type": "library", "bom-ref": part.purl, "name": part.name, "version": part.version}
        if part.license:
            one["licenses"] = [{"license": {"name": part.license}}]
        listed.append(one | {"purl": part.purl})
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "serialNumber": f"urn:uuid:{uuid.uuid5(NAMESPACE, image + digest)}",
        "version": 1,
        "metadata": {
            "tools": {"components": [{"type": "application", "name": "windlass", "version": __version__}]},
            "component": {"type": "container", "bom-ref": image, "name": image, "version": digest},
        },
        "components": listed,
    }


def _spdx(parts: list[Component], image: str, digest: str) -> dict[str, Any]:
    packages = [_spdx_package(image, digest, "NOASSERTION", None, "SPDXRef-image")]
    relations = [_relation("SPDXRef-DOCUMENT", "DESCRIBES", "SPDXRef-image")]
    for part in parts:
        reference = f"SPDXRef-{hashlib.sha256(part.purl.encode()).hexdigest()[:16]}"
        packages.append(_spdx_package(part.name, part.version, "NOASSERTION", part.purl, reference))
        relations.append(_relation("SPDXRef-image", "CONTAINS", reference))
    return {
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": "SPDXRef-DOCUMENT",
        "name": image,
        "documentNamespace": f"urn:uuid:{uuid.uuid5(NAMESPACE, image + digest)}",
        # The format wants a time. It is fixed, as the content is: the digest says which image this is.
        "creationInfo": {"created": "1970-01-01T00:00:00Z", "creators": [f"Tool: windlass-{__version__}"]},
        "packages": packages,
        "relationships": relations,
    }


def _spdx_package(name: str, version: str, license: str, purl: str | None, reference: str) -> dict[str, Any]:
    package: dict[str, Any] = {
        "name": name,
        "SPDXID": reference,
        "versionInfo": version,
        "downloadLocation": "NOASSERTION",
        "licenseConcluded": license,
        "licenseDeclared": license,
        "copyrightText": "NOASSERTION",
    }
    if purl:
        locator = {"referenceCategory": "PACKAGE-MANAGER", "referenceType": "purl", "referenceLocator": purl}
        package["externalRefs"] = [locator]
    return package


def _relation(of: str, kind: str, to: str) -> dict[str, str]:
    return {"spdxElementId": of, "relationshipType": kind, "relatedSpdxElement": to}
