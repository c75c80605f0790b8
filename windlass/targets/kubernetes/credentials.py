"""How a user proves who it is: tokens, token files, certificates and credential plugins such as `aws eks get-token`."""

from __future__ import annotations

import base64
import contextlib
import datetime
import json
import os
import ssl
import subprocess
import tempfile
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2

from windlass.errors import UserError

if TYPE_CHECKING:
    from windlass.targets.kubernetes.kubeconfig import Access

PLUGIN_SECONDS = 120.0  # a plugin may open a browser and wait for somebody to log in
RENEW_SECONDS = 60.0  # before a plugin's token expires


@dataclass
class Credentials(httpx2.Auth):
    """What goes with every request; a 401 makes it read the token anew, once."""

    access: Access
    issued: PluginAnswer | None = field(default=None, repr=False)

    def auth_flow(self, request: httpx2.Request) -> Generator[httpx2.Request, httpx2.Response, None]:
        if not self._authorize(request):
            yield request
            return
        response = yield request
        if response.status_code == 401 and self._can_renew:
            self.issued = None
            self._authorize(request)
            yield request

    @property
    def _can_renew(self) -> bool:
        return bool(self.access.user.get("exec") or self.access.user.get("tokenFile"))

    def _authorize(self, request: httpx2.Request) -> bool:
        user = self.access.user
        token = None
        if user.get("tokenFile"):
            token = _read(_path(self.access.user_folder, user["tokenFile"])).strip()
        elif user.get("token"):
            token = str(user["token"])
        elif user.get("exec"):
            token = self.plugin_answer().token
        elif user.get("username"):
            pair = f"{user['username']}:{user.get('password') or ''}"
            request.headers["Authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
            return True
        if token:
            request.headers["Authorization"] = f"Bearer {token}"
        return token is not None

    def plugin_answer(self) -> PluginAnswer:
        if self.issued is None or self.issued.is_stale():
            self.issued = run_plugin(self.access)
        return self.issued


@dataclass(frozen=True)
class PluginAnswer:
    token: str | None = field(repr=False)
    certificate: str | None = field(repr=False)
    key: str | None = field(repr=False)
    expires: datetime.datetime | None

    def is_stale(self) -> bool:
        if self.expires is None:
            return False
        return (self.expires - datetime.datetime.now(datetime.UTC)).total_seconds() < RENEW_SECONDS


def run_plugin(access: Access) -> PluginAnswer:
    """Call the credential plugin of a user entry; how it fails is one UserError in its own words."""
    plugin: Mapping[str, Any] = access.user["exec"]
    command = [str(plugin.get("command") or ""), *map(str, plugin.get("args") or ())]
    version = str(plugin.get("apiVersion") or "client.authentication.k8s.io/v1")
    info = {"apiVersion": version, "kind": "ExecCredential", "spec": {"interactive": False}}
    environment = {**os.environ, "KUBERNETES_EXEC_INFO": json.dumps(info)}
    environment |= {str(one["name"]): str(one["value"]) for one in plugin.get("env") or ()}
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PLUGIN_SECONDS,
            check=False,
        )
    except FileNotFoundError:
        raise UserError(
            f"the credential plugin {command[0]} of the context {access.context} is not installed",
            evidence=f"user {access.user_name} of {access.source} calls it",
            fix=str(plugin.get("installHint") or f"install {command[0]}").strip(),
        ) from None
    except subprocess.TimeoutExpired:
        raise UserError(f"{command[0]} gave no credentials within {PLUGIN_SECONDS:.0f} s") from None
    if done.returncode != 0:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        raise UserError(
            f"{command[0]} gave no credentials for the context {access.context}",
            evidence="\n".join(said[-3:]) or f"it exited with code {done.returncode}",
            fix=renewal(access),
        )
    try:
        status = json.loads(done.stdout)["status"]
        return PluginAnswer(
            token=status.get("token"),
            certificate=status.get("clientCertificateData"),
            key=status.get("clientKeyData"),
            expires=_moment(status.get("expirationTimestamp")),
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(
            f"{command[0]} did not answer with an ExecCredential",
            evidence=f"it printed {len(done.stdout)} characters",
            fix=" ".join(command),
        ) from None


def renewal(access: Access) -> str:
    """The command that gets new credentials, by how the user gets them."""
    plugin = access.user.get("exec")
    if plugin:
        command = str(plugin.get("command") or "")
        if command.rsplit("/", 1)[-1] in ("aws", "aws-iam-authenticator"):
            return "aws sso login    and if that does not help: aws eks update-kubeconfig --name CLUSTER"
        return " ".join([command, *map(str, plugin.get("args") or ())])
    if access.user.get("tokenFile"):
        return f"write a new token to {access.user['tokenFile']}"
    if access.user.get("client-certificate-data") or access.user.get("client-certificate"):
        return f"get a new kubeconfig from who runs the cluster; the certificate of {access.user_name} is too old"
    return f"kubectl config set-credentials {access.user_name or 'USER'} --token=NEW_TOKEN"


def tls(access: Access, credentials: Credentials) -> ssl.SSLContext:
    """The cluster's authority and, where the user has one, its certificate."""
    cluster, user = access.cluster, access.user
    try:
        if cluster.get("insecure-skip-tls-verify"):
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        elif cluster.get("certificate-authority-data"):
            authority = base64.b64decode(cluster["certificate-authority-data"]).decode()
            context = ssl.create_default_context(cadata=authority)
        elif cluster.get("certificate-authority"):
            authority_file = _path(access.cluster_folder, cluster["certificate-authority"])
            context = ssl.create_default_context(cafile=str(authority_file))
        else:
            context = ssl.create_default_context()
        with _certificate_files(user, access, credentials) as pair:
            if pair:
                context.load_cert_chain(*pair)
    except (OSError, ValueError) as error:  # ssl.SSLError and binascii.Error are among them
        raise UserError(
            f"the certificates of the context {access.context} cannot be used",
            evidence=str(error) or type(error).__name__,
            fix="kubectl config view --raw    shows them",
        ) from None
    return context


@contextlib.contextmanager
def _certificate_files(
    user: Mapping[str, Any], access: Access, credentials: Credentials
) -> Iterator[tuple[str, str] | None]:
    """Python's TLS reads certificates from files only: those that are given as data live as long as the reading."""
    if user.get("client-certificate") and user.get("client-key"):
        folder = access.user_folder
        yield str(_path(folder, user["client-certificate"])), str(_path(folder, user["client-key"]))
        return
    certificate = key = None
    if user.get("client-certificate-data"):
        certificate = base64.b64decode(user["client-certificate-data"]).decode()
        key = base64.b64decode(user.get("client-key-data") or "").decode()
    elif user.get("exec"):
        answer = credentials.plugin_answer()
        certificate, key = answer.certificate, answer.key
    if not certificate or not key:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="windlass-") as folder_name:  # 0700
        files = Path(folder_name) / "certificate", Path(folder_name) / "key"
        for file, text in zip(files, (certificate, key), strict=True):
            file.touch(0o600)
            file.write_text(text)
        yield str(files[0]), str(files[1])


def _path(folder: Path, name: str) -> Path:
    return folder / name  # an absolute name stays what it is


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"the token file {path} cannot be read", evidence=str(error)) from None


def _moment(text: str | None) -> datetime.datetime | None:
    return datetime.datetime.fromisoformat(text.replace("Z", "+00:00")) if text else None
