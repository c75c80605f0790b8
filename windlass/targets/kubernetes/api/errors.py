"""What the Kubernetes API refuses, and how it cannot be reached: each a UserError with the command that fixes it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from windlass.common.files import parse_record
from windlass.errors import NoAnswerError, UserError

if TYPE_CHECKING:
    import httpx2

    from windlass.targets.kubernetes.api.kubeconfig import Access

Asked = ParamSpec("Asked")
Answer = TypeVar("Answer")
# pods is forbidden: User "ann" cannot list resource "pods" in API group "" in the namespace "team"
FORBIDDEN = re.compile(
    r'User "(?P<user>[^"]*)" cannot (?P<verb>\S+) resource "(?P<resource>[^"]*)"'
    r'(?: in API group "(?P<group>[^"]*)")?(?: in the namespace "(?P<namespace>[^"]*)")?'
)
# Kubernetes 1.36 asks for `create` on pods/exec where older versions ask for `get`, as the method of a websocket is.
EXEC = re.compile(r"/namespaces/(?P<namespace>[^/]+)/pods/[^/]+/exec$")


class RefusedError(UserError):
    """An answer of the API that is not a success."""

    def __init__(self, code: int, reason: str, message: str, what: str, **parts: Any) -> None:
        super().__init__(what, **{"evidence": message or f"HTTP status {code}", **parts})
        self.code = code
        self.reason = reason
        self.message = message
        self.verb = ""  # what this user may not do, where it is a matter of roles
        self.further: str | None = None  # where a list that was cut off can be gone on with
        self.retry_after: float | None = None


class UnreachableError(NoAnswerError):
    """No answer at all, or none of the API's."""

    answered = False  # something answered, and would answer the same again


def if_allowed(ask: Callable[Asked, Answer], *args: Asked.args, **kwargs: Asked.kwargs) -> Answer | None:
    """The answer to a question; None where this user may not ask it."""
    try:
        return ask(*args, **kwargs)
    except RefusedError as error:
        if error.code != 403:
            raise
        return None


def in_words(error: Exception) -> str:
    """One line for somebody who watches, of whatever went wrong."""
    if isinstance(error, RefusedError | UnreachableError):
        return error.what
    if isinstance(error, UserError):
        lines = (error.evidence or "").splitlines()
        return f"{error.what}: {lines[-1]}" if lines else error.what
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}"


def refused(access: Access, response: httpx2.Response, content: bytes) -> RefusedError:
    """The error of one response."""
    status = parse_record(content) or {}
    code = response.status_code
    reason, message = str(status.get("reason") or ""), str(status.get("message") or "")
    message = message or content.decode(errors="replace").strip()[:500]
    error = _explained(access, code, reason, message, f"{response.request.method} {response.request.url.path}")
    metadata = status.get("metadata")
    error.further = metadata.get("continue") if isinstance(metadata, dict) else None
    seconds = response.headers.get("Retry-After", "")
    error.retry_after = float(seconds) if seconds.isdecimal() else None
    return error


def from_status(access: Access, status: dict[str, Any], what: str) -> RefusedError:
    """The error of a Status object that came inside a stream."""
    code = status.get("code")
    code = code if isinstance(code, int) else 500
    return _explained(access, code, str(status.get("reason") or ""), str(status.get("message") or ""), what)


def _explained(access: Access, code: int, reason: str, message: str, request: str) -> RefusedError:
    if code == 401:
        from windlass.targets.kubernetes.api.credentials import renewal

        return RefusedError(
            code,
            reason,
            message,
            f"the cluster of the context {access.context} does not accept your credentials",
            evidence=f"{access.server}: {message or 'Unauthorized'}",
            cause=f"the token or certificate of {access.user_name or 'the user'} has expired or is not known there",
            fix=renewal(access),
        )
    if code == 403:
        return _forbidden(access, code, reason, message, request)
    return RefusedError(code, reason, message, f"the Kubernetes API refused {request}")


def _forbidden(access: Access, code: int, reason: str, message: str, request: str) -> RefusedError:
    match = FORBIDDEN.search(message)
    if match is not None:
        user, verb, group, namespace = match["user"], match["verb"], match["group"], match["namespace"]
        whole = match["resource"]
    elif place := EXEC.search(request):  # a second look at websockets, which says no more than no
        user, verb, group, namespace, whole = access.user_name or "", "create", "", place["namespace"], "pods/exec"
    else:  # an admission controller or a quota: nothing that another role would change
        return RefusedError(code, reason, message, "the cluster does not admit it")
    plural, _, sub = whole.partition("/")
    resource = f"{plural}.{group}" if group else plural
    where = f" -n {namespace}" if namespace else ""
    place_text = f"in the namespace {namespace}" if namespace else "in the cluster"
    question = f"kubectl auth can-i {verb} {resource}{f' --subresource={sub}' if sub else ''}{where}"
    kind = "role" if namespace else "clusterrole"
    granted = f"kubectl create {kind} windlass --verb={verb} --resource={resource}{f'/{sub}' if sub else ''}{where}"
    error = RefusedError(
        code,
        reason,
        message,
        f"you may not {verb} {whole} {place_text}",
        evidence=f"user {user} of the context {access.context}: {message}",
        fix=f"{question} --context {access.context}    says whether you may\n"
        f"{granted}    and a binding to it, by who runs the cluster, allow it\n"
        "docs/kubernetes.md, Permissions, has the whole role",
    )
    error.verb = verb
    return error


def unreachable(access: Access, error: Exception) -> UnreachableError:
    text, proxy = str(error) or type(error).__name__, access.cluster.get("proxy-url")
    if "CERTIFICATE_VERIFY_FAILED" in text or "certificate verify failed" in text:
        return UnreachableError(
            f"the certificate of {access.server} is not that of the context {access.context}",
            evidence=text,
            cause="the cluster was made anew, or something answers in its place",
            fix="aws eks update-kubeconfig --name CLUSTER    or another way to a new kubeconfig",
        )
    return UnreachableError(
        f"the Kubernetes API of the context {access.context} does not answer",
        evidence=f"{access.server}{f' through the proxy {proxy}' if proxy else ''}: {text}",
        cause="the cluster is gone or down, or the way to it (VPN, proxy, network) is",
        fix=f"kubectl --context {access.context} cluster-info    or another one: --on kubernetes:CONTEXT",
    )


def not_the_api(access: Access, content: bytes, what: str) -> UnreachableError:
    """For an answer that no API server gives."""
    shown = " ".join(content[:500].decode(errors="replace").split())[:160]
    error = UnreachableError(
        f"what answers for the context {access.context} is not the Kubernetes API, or its answer was cut: {what}",
        evidence=f"{access.server}: {shown or 'nothing'}",
        cause="a proxy, a login page or a firewall on the way answers in its place",
        fix=f"curl -k {access.server}/version    shows who answers; log in there, or change proxy-url and $HTTPS_PROXY",
    )
    error.answered = True
    return error
