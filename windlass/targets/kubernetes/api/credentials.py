"""How a user proves who it is: tokens, token files, certificates and credential plugins such as `aws eks get-token`."""

from __future__ import annotations

import base64
import contextlib
import copy
import datetime
import json
import os
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import httpx2

from windlass.errors import UserError

if TYPE_CHECKING:
    from windlass.targets.kubernetes.api.kubeconfig import Access

PLUGIN_SECONDS = 120.0  # a plugin may open a browser and wait for somebody to log in
RENEW_SECONDS = 60.0  # before a plugin's token expires
PAUSE_SECONDS = 2.0  # between two calls of a plugin that fails
V1 = "client.authentication.k8s.io/v1"
# What kubectl's built-in providers were replaced by.
INSTEAD = {
    "gcp": "gcloud components install gke-gcloud-auth-plugin && gcloud container clusters get-credentials CLUSTER",
    "azure": "az aks get-credentials --name CLUSTER --resource-group GROUP && kubelogin convert-kubeconfig",
}
HEADER_KEY = "!#$&'*+-.^_`|~"  # beside letters and digits; everything else is percent-encoded, as client-go does


@dataclass(frozen=True)
class PluginAnswer:
    token: str | None = field(repr=False)
    certificate: str | None = field(repr=False)
    key: str | None = field(repr=False)
    expires: datetime.datetime | None

    @property
    def pair(self) -> tuple[str, str] | None:
        return (self.certificate, self.key) if self.certificate and self.key else None

    def seconds_left(self) -> float:
        if self.expires is None:
            return float("inf")
        return (self.expires - datetime.datetime.now(datetime.UTC)).total_seconds()


@dataclass
class Credentials(httpx2.Auth):
    """What goes with every request; a 401 makes it get a new token, once. Safe to use from many threads."""

    access: Access
    issued: PluginAnswer | None = field(default=None, repr=False)
    _failed: tuple[float, UserError] | None = field(default=None, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def auth_flow(self, request: httpx2.Request) -> Generator[httpx2.Request, httpx2.Response, None]:
        used = self._authorize(request)
        response = yield request
        if response.status_code != 401 or not (used or self.access.user.get("tokenFile")):
            return
        with self._lock:
            if self.issued is used:  # else another request has had a new one issued in the meantime
                self.issued = None
        self._authorize(request)
        yield request

    def plugin_answer(self) -> PluginAnswer:
        """What the plugin has issued; it is called when that expires, by one thread for all."""
        begin = time.monotonic()
        with self._lock:
            left = self.issued.seconds_left() if self.issued else 0.0
            if self.issued is not None and left >= RENEW_SECONDS:
                return self.issued
            try:
                if self._failed is not None and begin < self._failed[0] + PAUSE_SECONDS:
                    raise copy.copy(self._failed[1])
                self.issued = run_plugin(self.access)
                self._failed = None
            except UserError as error:
                if self._failed is None or begin >= self._failed[0] + PAUSE_SECONDS:
                    self._failed = (time.monotonic(), error)
                if self.issued is None or left <= 0:
                    raise  # else the old one is good for some seconds more
            return self.issued

    def pair(self) -> tuple[str, str] | None:
        """The certificate and key that a plugin has issued."""
        return self.plugin_answer().pair if self.access.user.get("exec") else None

    def _authorize(self, request: httpx2.Request) -> PluginAnswer | None:
        """Add the header; the plugin's answer where it comes from one."""
        user, answer, token = self.access.user, None, None
        if user.get("tokenFile"):
            token = _read(self.access.user_folder / str(user["tokenFile"])).strip()
        elif user.get("token"):
            token = str(user["token"])
        elif user.get("exec"):
            answer = self.plugin_answer()
            token = answer.token
        elif user.get("auth-provider"):
            token = id_token(self.access)
        elif user.get("username"):
            pair = f"{user['username']}:{user.get('password') or ''}"
            request.headers["Authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
        if token:
            if not token.isascii() or not token.isprintable() or " " in token:
                raise UserError(
                    f"the token of {self.access.user_name or 'the user'} holds characters that no token has",
                    evidence=f"user {self.access.user_name} of {self.access.source}",
                    fix=renewal(self.access),
                )
            request.headers["Authorization"] = f"Bearer {token}"
        return answer


def impersonation(access: Access) -> list[tuple[bytes, bytes]]:
    """The headers that make the server treat the requests as another user's, as a kubeconfig's `as…` keys say."""
    user = access.user
    groups, extra, uid = user.get("as-groups") or (), user.get("as-user-extra") or {}, user.get("as-uid")
    well_formed = (
        isinstance(groups, list | tuple)
        and isinstance(extra, dict)
        and all(isinstance(part, list | tuple) for part in extra.values())
    )
    if not well_formed or ((groups or extra or uid) and not user.get("as")):
        raise UserError(
            f"the user {access.user_name} of {access.source} impersonates nobody in particular",
            evidence="as-groups, as-uid and as-user-extra go with `as`; groups and extra values are lists"
            if well_formed
            else "as-groups is a list of names, as-user-extra a mapping to lists",
            fix=f"kubectl config view --raw    shows it; add `as: NAME` to the user {access.user_name}",
        )
    if not user.get("as"):
        return []
    headers = [("Impersonate-User", str(user["as"]))]
    headers += [("Impersonate-Uid", str(uid))] if uid else []
    headers += [("Impersonate-Group", str(group)) for group in groups]
    for key, values in extra.items():
        name = f"Impersonate-Extra-{urllib.parse.quote(str(key), safe=HEADER_KEY)}"
        headers += [(name, str(part)) for part in values]
    for _, value in headers:
        if not value.isprintable():
            raise UserError(f"the user {access.user_name} of {access.source} impersonates {value!r}, which is no name")
    return [(name.encode(), value.encode()) for name, value in headers]


def run_plugin(access: Access) -> PluginAnswer:
    """Call the credential plugin of a user entry; how it fails is one UserError in its own words."""
    plugin = access.user["exec"]
    if not isinstance(plugin, dict) or not plugin.get("command"):
        raise _no_plugin(access, "it names no command")
    try:
        command = [str(plugin["command"]), *map(str, plugin.get("args") or ())]
        given = {str(variable["name"]): str(variable["value"]) for variable in plugin.get("env") or ()}
    except (TypeError, KeyError, AttributeError):
        raise _no_plugin(access, "args is a list of words, env a list of name and value") from None
    if os.sep in command[0]:
        command[0] = str(access.user_folder / command[0])  # relative to the kubeconfig that names it
    interactive = _is_interactive(access, plugin, command[0])
    info = {
        "apiVersion": str(plugin.get("apiVersion") or V1),
        "kind": "ExecCredential",
        "spec": {"interactive": interactive, **_cluster_info(access, plugin)},
    }
    environment = {**os.environ, **given, "KUBERNETES_EXEC_INFO": json.dumps(info)}
    try:
        code, out, complaints = _call(command, environment, interactive=interactive)
    except FileNotFoundError:
        raise UserError(
            f"the credential plugin {command[0]} of the context {access.context} is not installed",
            evidence=f"user {access.user_name} of {access.source} calls it",
            fix=str(plugin.get("installHint") or f"install {command[0]}").strip(),
        ) from None
    except (OSError, ValueError) as error:  # not executable; a null character in an argument
        raise UserError(
            f"the credential plugin {command[0]} of the context {access.context} cannot be started",
            evidence=str(error),
        ) from None
    except subprocess.TimeoutExpired:
        raise UserError(f"{command[0]} gave no credentials within {PLUGIN_SECONDS:.0f} s") from None
    if code != 0:
        lines = [line for line in complaints.splitlines() if line.strip()]
        raise UserError(
            f"{command[0]} gave no credentials for the context {access.context}",
            evidence="\n".join(lines[-3:]) or f"it exited with code {code}",
            fix=renewal(access),
        )
    answer = parse_answer(out)
    if answer is None:
        raise UserError(
            f"{command[0]} did not answer with an ExecCredential",
            evidence=f"it printed {len(out)} characters, with no status that has a token or a certificate and its key",
            fix=" ".join(command),
        )
    return answer


def parse_answer(text: str) -> PluginAnswer | None:
    """The credentials that a plugin has printed; None if it printed something else."""
    try:
        status = json.loads(text)["status"]
        answer = PluginAnswer(
            token=status.get("token"),
            certificate=status.get("clientCertificateData"),
            key=status.get("clientKeyData"),
            expires=_moment(status.get("expirationTimestamp")),
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None
    texts = (answer.token, answer.certificate, answer.key)
    if not all(value is None or isinstance(value, str) for value in texts) or not (answer.token or answer.pair):
        return None
    return answer


def id_token(access: Access) -> str:
    """The token of kubectl's OpenID Connect login. Kubectl renews it in the kubeconfig; here it is only read."""
    from windlass.targets.kubernetes.api.kubeconfig import access as read_again

    provider: Any = access.user.get("auth-provider")
    name = str(provider.get("name") or "") if isinstance(provider, dict) else ""
    if name != "oidc":
        raise UserError(
            f"the user {access.user_name} logs in by the auth-provider {name or '?'}, which kubectl has no more",
            evidence=f"user {access.user_name} of {access.source}",
            fix=INSTEAD.get(name, "a kubeconfig with a credential plugin (users[].user.exec)"),
        )
    token = _id_token_of(access.user)
    if token is None:
        token = _id_token_of(read_again(access.context, access.namespace).user)
    if token is None:
        raise UserError(
            f"the OpenID Connect token of {access.user_name} has expired, or there is none",
            evidence=f"users[].user.auth-provider.config.id-token of {access.source}",
            cause="windlass reads this token and does not renew it; kubectl does",
            fix=f"kubectl --context {access.context} version    renews it; then the same command again\n"
            "kubectl oidc-login setup    makes a kubeconfig whose plugin renews it by itself",
        )
    return token


def _id_token_of(user: Mapping[str, Any]) -> str | None:
    """The token, unless it says itself that it has expired."""
    provider = user.get("auth-provider")
    config = provider.get("config") if isinstance(provider, dict) else None
    token = config.get("id-token") if isinstance(config, dict) else None
    if not isinstance(token, str) or not token:
        return None
    try:
        middle = token.split(".")[1]
        expires = float(json.loads(base64.urlsafe_b64decode(middle + "=" * (-len(middle) % 4)))["exp"])
    except (IndexError, ValueError, KeyError, TypeError, RecursionError):
        return token  # the server knows better what it is
    return token if expires > time.time() + 10 else None


def renewal(access: Access) -> str:
    """The command that gets new credentials, by how the user gets them."""
    plugin = access.user.get("exec")
    if isinstance(plugin, dict) and plugin:
        command = str(plugin.get("command") or "")
        if command.rsplit("/", 1)[-1] in ("aws", "aws-iam-authenticator"):
            return "aws sso login    and if that does not help: windlass cluster use CLUSTER"
        words = plugin.get("args")
        return " ".join([command, *map(str, words if isinstance(words, list) else ())])
    if access.user.get("auth-provider"):
        return f"kubectl --context {access.context} version    renews the token; then the same command again"
    if access.user.get("tokenFile"):
        return f"write a new token to {access.user['tokenFile']}"
    if access.user.get("client-certificate-data") or access.user.get("client-certificate"):
        return f"get a new kubeconfig from who runs the cluster; the certificate of {access.user_name} is too old"
    return f"kubectl config set-credentials {access.user_name or 'USER'} --token=NEW_TOKEN"


def tls(access: Access, issued: tuple[str, str] | None = None) -> ssl.SSLContext:
    """The cluster's authority and, where the user has one, its certificate: its own, or one that a plugin issued."""
    cluster = access.cluster
    try:
        if cluster.get("insecure-skip-tls-verify") is True:
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        elif cluster.get("certificate-authority-data"):
            authority = base64.b64decode(cluster["certificate-authority-data"]).decode()
            context = ssl.create_default_context(cadata=authority)
        elif cluster.get("certificate-authority"):
            authority_file = access.cluster_folder / cluster["certificate-authority"]
            context = ssl.create_default_context(cafile=str(authority_file))
        else:
            context = ssl.create_default_context()
        with _certificate_files(access, issued) as files:
            if files:
                context.load_cert_chain(*files)
    except (OSError, ValueError, TypeError) as error:  # ssl.SSLError and binascii.Error are among them
        raise UserError(
            f"the certificates of the context {access.context} cannot be used",
            evidence=str(error) or type(error).__name__,
            fix="kubectl config view --raw    shows them",
        ) from None
    return context


@contextlib.contextmanager
def _certificate_files(access: Access, issued: tuple[str, str] | None) -> Iterator[tuple[str, str] | None]:
    """Python's TLS reads certificates from files only: those that are given as data live as long as the reading."""
    with tempfile.TemporaryDirectory(prefix="windlass-") as temporary:  # 0700

        def file_of(kind: str, text: str | None) -> str | None:
            """Data goes before a file, as with client-go; each of the two can be given either way."""
            data = access.user.get(f"{kind}-data")
            if text is None and data:
                text = base64.b64decode(data).decode()
            if text is None:
                name = access.user.get(kind)
                return str(access.user_folder / str(name)) if name else None
            path = Path(temporary) / kind
            path.touch(0o600)
            path.write_text(text)
            return str(path)

        certificate = file_of("client-certificate", issued[0] if issued else None)
        key = file_of("client-key", issued[1] if issued else None)
        if (certificate is None) != (key is None):
            missing = "key" if key is None else "certificate"
            raise ValueError(f"the user {access.user_name} has no client-{missing} or client-{missing}-data")
        yield (certificate, key) if certificate and key else None


def _no_plugin(access: Access, why: str) -> UserError:
    return UserError(
        f"the credential plugin of the user {access.user_name} is not well-formed: {why}",
        evidence=access.source,
        fix="kubectl config view --raw    shows it",
    )


def _is_interactive(access: Access, plugin: Mapping[str, Any], command: str) -> bool:
    """Whether the plugin gets this terminal; only the main thread may lend it, for others work in its background."""
    mode = str(plugin.get("interactiveMode") or "IfAvailable")
    has_terminal = (
        sys.stdin is not None and sys.stdin.isatty() and threading.current_thread() is threading.main_thread()
    )
    if mode == "Always" and not has_terminal:
        raise UserError(
            f"{command} wants to ask somebody at a terminal, and there is none",
            evidence=f"interactiveMode is Always for the user {access.user_name} of {access.source}",
            fix=f"{renewal(access)}    at a terminal, if it keeps what it gets; or another user of the kubeconfig",
        )
    return has_terminal and mode != "Never"


def _cluster_info(access: Access, plugin: Mapping[str, Any]) -> dict[str, Any]:
    """The cluster, for plugins that ask to be told (provideClusterInfo)."""
    if plugin.get("provideClusterInfo") is not True:
        return {}
    cluster = access.cluster
    kept = ("tls-server-name", "insecure-skip-tls-verify", "certificate-authority-data", "proxy-url")
    info = {"server": access.server, **{key: cluster[key] for key in kept if cluster.get(key)}}
    if cluster.get("certificate-authority") and "certificate-authority-data" not in info:
        authority = access.cluster_folder / str(cluster["certificate-authority"])
        with contextlib.suppress(OSError):
            info["certificate-authority-data"] = base64.b64encode(authority.read_bytes()).decode()
    extensions = cluster.get("extensions")
    for extension in extensions if isinstance(extensions, list) else ():
        if isinstance(extension, dict) and extension.get("name") == "client.authentication.k8s.io/exec":
            info["config"] = extension.get("extension")
    return {"cluster": info}


def _call(command: Sequence[str], environment: Mapping[str, str], *, interactive: bool) -> tuple[int, str, str]:
    """The exit code, output and complaints of a plugin; an interactive one's complaints are shown as they come."""
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=None if interactive else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    out, complaints = bytearray(), bytearray()
    readers = [
        threading.Thread(target=_copy, args=(process.stdout, out, None), daemon=True),
        threading.Thread(
            target=_copy, args=(process.stderr, complaints, sys.stderr if interactive else None), daemon=True
        ),
    ]
    for reader in readers:
        reader.start()
    deadline = time.monotonic() + PLUGIN_SECONDS
    try:
        code = process.wait(PLUGIN_SECONDS)
    except BaseException:
        process.kill()
        process.wait()
        raise
    for reader in readers:  # a child that it left behind may hold the pipes open
        reader.join(min(5.0, max(0.1, deadline - time.monotonic())))
    return code, bytes(out).decode(errors="replace"), bytes(complaints).decode(errors="replace")


def _copy(source: IO[bytes], to: bytearray, echo: Any) -> None:
    with contextlib.suppress(OSError, ValueError), source:
        while chunk := os.read(source.fileno(), 65536):
            to += chunk
            if echo is not None:
                echo.write(chunk.decode(errors="replace"))
                echo.flush()


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the token file {path} cannot be read", evidence=str(error)) from None


def _moment(text: str | None) -> datetime.datetime | None:
    if not text:
        return None
    moment = datetime.datetime.fromisoformat(text.replace("Z", "+00:00"))
    return moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)
