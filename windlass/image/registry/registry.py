"""A registry, spoken to directly: manifests and blobs of one repository over the distribution API."""

from __future__ import annotations

import hashlib
import http.client
import json
import re
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from typing import Any

from windlass.errors import ExitCode, UserError
from windlass.image.registry.credentials import PASSWORD_VARIABLE, USER_VARIABLE, Credentials
from windlass.image.registry.reference import HUB, ImageReference, is_loopback

ACCEPTED = ", ".join(
    (
        "application/vnd.oci.image.manifest.v1+json",
        "application/vnd.oci.image.index.v1+json",
        "application/vnd.docker.distribution.manifest.v2+json",
        "application/vnd.docker.distribution.manifest.list.v2+json",
    )
)
SECONDS = 60


@dataclass(frozen=True)
class Manifest:
    """As the registry stores it: the digest is that of these very bytes, computed here."""

    body: bytes

    @property
    def digest(self) -> str:
        return f"sha256:{hashlib.sha256(self.body).hexdigest()}"

    @property
    def values(self) -> dict[str, Any]:
        values: dict[str, Any] = json.loads(self.body)
        return values

    @property
    def size(self) -> int:
        return sum(layer["size"] for layer in self.values.get("layers", ()))


class Repository:
    """One repository of a registry."""

    def __init__(
        self, image: ImageReference, credentials: Credentials | None = None, *, plain_http: bool = False
    ) -> None:
        if image.registry is None:
            raise UserError(f"{image} names no registry", fix=f"registry.example.com/{image}")
        self.registry = image.registry
        self.path = image.repository
        if image.registry == HUB and "/" not in self.path:
            self.path = f"library/{self.path}"
        host = "registry-1.docker.io" if image.registry == HUB else image.registry
        local = is_loopback(image.registry)
        self._root = f"{'http' if plain_http or local else 'https'}://{host}/v2/{self.path}"
        self._credentials = credentials
        self._authorization = f"Basic {credentials.basic}" if credentials else None
        self._opener = urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if local else []))

    def manifest(self, pointer: str) -> Manifest | None:
        """By tag or digest; None where there is none."""
        body = self._find("GET", f"manifests/{pointer}")
        return None if body is None else Manifest(body)

    def has_blob(self, digest: str) -> bool:
        return self._find("HEAD", f"blobs/{digest}") is not None

    def _find(self, method: str, where: str, *, token_is_new: bool = False) -> bytes | None:
        """The body of the answer; None for what is not there."""
        try:
            return self._send(method, f"{self._root}/{where}", self._authorization)
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            challenge = error.headers.get("WWW-Authenticate", "")
            if error.code != 401 or token_is_new or not challenge.lower().startswith("bearer "):
                raise self._refusal(method, error) from None
        self._authorization = self._new_token(challenge)
        return self._find(method, where, token_is_new=True)

    def _new_token(self, challenge: str) -> str:
        values = dict(re.findall(r'(\w+)="([^"]*)"', challenge))
        query = {key: values[key] for key in ("service", "scope") if key in values}
        if "push" not in query.get("scope", "") and (self._credentials or "scope" not in query):
            query["scope"] = f"repository:{self.path}:pull,push"
        basic = f"Basic {self._credentials.basic}" if self._credentials else None
        try:
            said = json.loads(self._send("GET", f"{values['realm']}?{urllib.parse.urlencode(query)}", basic))
        except urllib.error.HTTPError as error:
            raise self._refusal("GET", error) from None
        return f"Bearer {said.get('token') or said.get('access_token')}"

    def _send(self, method: str, url: str, authorization: str | None) -> bytes:
        request = urllib.request.Request(url, headers={"Accept": ACCEPTED}, method=method)
        if authorization:  # not for the object store that a registry often redirects to
            request.add_unredirected_header("Authorization", authorization)
        try:
            with self._opener.open(request, timeout=SECONDS) as answer:
                return bytes(answer.read())
        except urllib.error.HTTPError:
            raise
        except (http.client.HTTPException, OSError) as error:
            raise unreachable(self.registry, str(getattr(error, "reason", error))) from None

    def _refusal(self, method: str, error: urllib.error.HTTPError) -> UserError:
        said = error.read().decode(errors="replace").strip()[:400]
        if error.code in (401, 403):
            return denied(self.registry, self.path, said, known=self._credentials is not None)
        return UserError(
            f"{self.registry} answers {error.code} to {method} of {self.path}",
            evidence=said or error.reason,
            exit_code=ExitCode.FAILED,
        )


def denied(registry: str, repository: str, evidence: str, *, known: bool) -> UserError:
    cause = "the user may not do that" if known else "no credentials were found for it"
    return UserError(
        f"{registry} denies access to {repository}",
        evidence=evidence or None,
        cause=cause,
        fix=f"docker login {registry}    or podman login {registry}\nor set {USER_VARIABLE} and {PASSWORD_VARIABLE}",
    )


def unreachable(registry: str, evidence: str) -> UserError:
    return UserError(
        f"the registry {registry} does not answer",
        evidence=evidence,
        cause="it is down, its name is wrong, or the network does not lead there",
        fix=f"curl -i {'http' if is_loopback(registry) else 'https'}://{registry}/v2/    shows what it says",
        exit_code=ExitCode.FAILED,
    )
