"""Who may read the page, and what a browser may do with it."""

from __future__ import annotations

import hmac
import ipaddress
import socket
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

COOKIE = "windlass-token"
# The page loads nothing but its own files, runs no inline script, is shown in no frame and sends no form.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class Guard:
    """Lets reading requests of the right people through, and gives every answer its headers."""

    def __init__(self, app: ASGIApp, *, host: str, token: str | None) -> None:
        self.app, self.token = app, token
        self.names = {"localhost", host.lower(), socket.gethostname().lower(), socket.getfqdn().lower()}
        self.only_loopback = is_loopback(host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        refusal = self.refusal(scope) or self.asked_for_token(scope)

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                headers.setdefault("cache-control", "no-store")
            await send(message)

        await (refusal or self.app)(scope, receive, with_headers)

    def refusal(self, scope: Scope) -> Response | None:
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("this page only reads", 405, {"allow": "GET, HEAD"})
        headers = Headers(scope=scope)
        if not self.is_own_name(headers.get("host", "")):
            # a page of somebody else's whose name leads to this machine (DNS rebinding) would send its own name
            return PlainTextResponse("this name is not served here; use the address that windlass ui printed", 421)
        if headers.get("sec-fetch-site") == "cross-site" and headers.get("sec-fetch-mode") != "navigate":
            return PlainTextResponse("other pages may not read this one", 403)
        return None

    def is_own_name(self, host: str) -> bool:
        name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
        name = name.lower().strip("[]")
        if self.only_loopback:
            return is_loopback(name)
        try:
            ipaddress.ip_address(name)  # an address is no name that somebody could point here
        except ValueError:
            return name in self.names
        return True

    def asked_for_token(self, scope: Scope) -> Response | None:
        """Nothing where the token came with the request; a redirect that keeps it as a cookie where it was typed."""
        if self.token is None:
            return None
        request = Request(scope)
        cookie = f"{COOKIE}-{(scope.get('server') or ('', 0))[1]}"  # browsers send cookies to every port of a machine
        pairs = parse_qsl(scope["query_string"].decode("latin-1"))
        typed = next((value for key, value in pairs if key == "token"), None)
        if typed is not None and self.is_token(typed):
            rest = urlencode([(key, value) for key, value in pairs if key != "token"])
            path = f"/{scope['path'].lstrip('/')}"  # two slashes would lead to another server
            response = RedirectResponse(f"{path}?{rest}" if rest else path, 303)
            response.set_cookie(cookie, typed, httponly=True, samesite="strict")
            return response
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        given = bearer if scheme.lower() == "bearer" else request.cookies.get(cookie, "")
        if self.is_token(given):
            return None
        return PlainTextResponse("a token is needed: open the address that windlass ui printed", 401)

    def is_token(self, text: str) -> bool:
        return hmac.compare_digest(text.encode(), (self.token or "").encode())
