"""A registry, spoken to directly: manifests and blobs of one repository over the distribution API."""

from __future__ import annotations

import hashlib
import http.client
import json
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

from windlass.errors import ExitCode, UserError
from windlass.image.registry.credentials import PASSWORD_VARIABLE, USER_VARIABLE, Credentials
from windlass.image.registry.reference import HUB, ImageReference, is_loopback

OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
OCI_INDEX = "application/vnd.oci.image.index.v1+json"
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
DOCKER_LIST = "application/vnd.docker.distribution.manifest.list.v2+json"
INDEXES = (OCI_INDEX, DOCKER_LIST)
ACCEPTED = ", ".join((OCI_MANIFEST, OCI_INDEX, DOCKER_MANIFEST, DOCKER_LIST))
SECONDS = 60


@dataclass(frozen=True)
class Manifest:
    """As the registry stores it: the digest is that of these very bytes, computed here."""

    body: bytes
    media_type: str

    @property
    def digest(self) -> str:
        return f"sha256:{hashlib.sha256(self.body).hexdigest()}"

    @property
    def values(self) -> dict[str, Any]:
        values: dict[str, Any] = json.loads(self.body)
        return values

    @property
    def is_index(self) -> bool:
        return self.media_type in INDEXES


class _NoSecretsElsewhere(urllib.request.HTTPRedirectHandler):
    """Blobs often live in an object store; what we say to the registry is not for that host."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        made = super().redirect_request(req, fp, code, msg, headers, newurl)
        if made and urllib.parse.urlsplit(newurl).netloc != urllib.parse.urlsplit(req.full_url).netloc:
            made.headers.pop("Authorization", None)
        return made


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
        self._root = f"{'http' if plain_http or local else 'https'}://{host}/v2/"
        self._credentials = credentials
        self._authorization: str | None = f"Basic {credentials.basic}" if credentials else None
        handlers: list[urllib.request.BaseHandler] = [_NoSecretsElsewhere()]
        if local:
            handlers.append(urllib.request.ProxyHandler({}))
        self._opener = urllib.request.build_opener(*handlers)

    def manifest(self, pointer: str) -> Manifest | None:
        """By tag or digest; None where there is none."""
        answer = self._ask("GET", f"manifests/{pointer}", headers={"Accept": ACCEPTED}, absent_is_none=True)
        if answer is None:
            return None
        body, headers = answer
        return Manifest(body, headers.get("Content-Type", OCI_MANIFEST).split(";")[0].strip())

    def put_manifest(self, pointer: str, manifest: Manifest) -> None:
        self._ask("PUT", f"manifests/{pointer}", headers={"Content-Type": manifest.media_type}, data=manifest.body)

    def has_blob(self, digest: str) -> bool:
        return self._ask("HEAD", f"blobs/{digest}", absent_is_none=True) is not None

    def blob(self, digest: str) -> bytes:
        """A small blob, such as a configuration; its bytes are compared with its name."""
        answer = self._ask("GET", f"blobs/{digest}")
        assert answer is not None
        if f"sha256:{hashlib.sha256(answer[0]).hexdigest()}" != digest:
            raise UserError(f"{self.registry} gave other bytes for {digest}", exit_code=ExitCode.FAILED)
        return answer[0]

    def put_blob(self, digest: str, data: bytes | BinaryIO, size: int) -> None:
        """Nothing is sent where the registry has it."""
        if self.has_blob(digest):
            return
        begun = self._ask("POST", "blobs/uploads/", data=b"")
        assert begun is not None
        place = urllib.parse.urljoin(self._root + f"{self.path}/", begun[1]["Location"])
        place += ("&" if "?" in place else "?") + urllib.parse.urlencode({"digest": digest})
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(size)}
        self._ask("PUT", place, headers=headers, data=data)

    def _ask(
        self,
        method: str,
        where: str,
        *,
        headers: Mapping[str, str] | None = None,
        data: bytes | BinaryIO | None = None,
        absent_is_none: bool = False,
    ) -> tuple[bytes, Mapping[str, str]] | None:
        url = where if "://" in where else f"{self._root}{self.path}/{where}"
        for last_try in (False, True):
            request = urllib.request.Request(url, data=data, headers=dict(headers or {}), method=method)
            if self._authorization and urllib.parse.urlsplit(url).netloc == urllib.parse.urlsplit(self._root).netloc:
                request.add_unredirected_header("Authorization", self._authorization)
            try:
                with self._opener.open(request, timeout=SECONDS) as answer:
                    return answer.read(), answer.headers
            except urllib.error.HTTPError as error:
                if error.code == 404 and absent_is_none:
                    return None
                if error.code == 401 and not last_try and self._fetch_token(error.headers.get("WWW-Authenticate", "")):
                    continue
                raise self._refusal(method, error) from None
            except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
                raise self.unreachable(str(getattr(error, "reason", error))) from None
        raise AssertionError("unreachable")

    def _fetch_token(self, challenge: str) -> bool:
        """A bearer token, where the registry asks for one. A refused password is not tried again."""
        scheme, _, rest = challenge.partition(" ")
        if scheme.lower() != "bearer" or (self._authorization or "").startswith("Bearer"):
            return False
        values = dict(re.findall(r'(\w+)="([^"]*)"', rest))
        query = {key: values[key] for key in ("service", "scope") if key in values}
        query.setdefault("scope", f"repository:{self.path}:pull,push")
        if "push" not in query["scope"]:
            query["scope"] = f"repository:{self.path}:pull,push" if self._credentials else query["scope"]
        request = urllib.request.Request(f"{values['realm']}?{urllib.parse.urlencode(query)}")
        if self._credentials:
            request.add_unredirected_header("Authorization", f"Basic {self._credentials.basic}")
        try:
            with self._opener.open(request, timeout=SECONDS) as answer:
                said = json.load(answer)
        except urllib.error.HTTPError as error:
            raise self._refusal("GET", error) from None
        except (urllib.error.URLError, OSError) as error:
            raise self.unreachable(str(getattr(error, "reason", error))) from None
        self._authorization = f"Bearer {said.get('token') or said.get('access_token')}"
        return True

    def _refusal(self, method: str, error: urllib.error.HTTPError) -> UserError:
        said = error.read().decode(errors="replace").strip()[:400]
        if error.code in (401, 403):
            return denied(self.registry, self.path, said, known=self._credentials is not None)
        return UserError(
            f"{self.registry} answers {error.code} to {method} of {self.path}",
            evidence=said or error.reason,
            exit_code=ExitCode.FAILED,
        )

    def unreachable(self, reason: str) -> UserError:
        return unreachable(self.registry, reason)


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
