"""What every request passes before it is looked at: who asks, by which name, how much is sent; and the headers of every answer.

A body is read here, counted as it comes, and handed on whole; so no later reader sees more than `most_bytes`, and one that
comes too slowly ends. Where the service listens on loopback without a token, the request must name a loopback host:
otherwise a web page could reach it under a name of its own that it points at this machine. What another site's page sends is refused.
"""

import asyncio
import base64
import binascii
import hmac
import ipaddress
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import Refusal, refuse

CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": CSP,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "X-Frame-Options": "DENY",
}
OPEN = ("/health", "/static/")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a service allows."""

    token: str | None = None
    most_bytes: int = 1 << 20  # of a request's body
    body_seconds: float = 20.0  # within which a body must have come
    any_host: bool = False  # whether requests may name any host; False: a loopback name


def loopback(host: str) -> bool:
    """Whether a host name or address is this machine's own."""
    name = host.strip("[]").rstrip(".").lower()
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")


def foreign(headers: Headers) -> bool:
    """Whether a browser says that the page of another origin sends this request; a program says nothing."""
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site not in (None, "same-origin", "none"):
        return True
    if origin == "null":  # also of our own forms, for they send no referrer; then the site is given
        return site is None
    return origin is not None and _host_of(origin) != headers.get("host", "").lower()


def _host_of(origin: str) -> str | None:
    """Host and port that an origin names; None where it names none or cannot be read, which is no host of ours."""
    try:
        return urlsplit(origin).netloc.lower() or None
    except ValueError:
        return None


class Guard:
    """ASGI around the application."""

    def __init__(self, app: ASGIApp, limits: Limits, say: Callable[[Request, Refusal], Response]) -> None:
        self.app, self.limits, self.say = app, limits, say

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        sender = _Sender(send)
        try:
            self._check(scope)
            await self.app({**scope, **_filled(scope)}, await self._whole(scope, receive), sender)
        except Exception as error:
            refusal = refuse(error)
            if not sender.began:
                await self.say(Request(scope), refusal)(scope, receive, sender)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        if not self.limits.any_host and not loopback(name):
            raise Refusal(
                400, "the Host header does not name this machine.", "Use the address that the service printed."
            )
        if scope["method"] not in ("GET", "HEAD", "OPTIONS") and foreign(headers):
            raise Refusal(
                403,
                "the request comes from the page of another site.",
                "Send it from the service's own page, or from a program that sends no Origin.",
            )
        path = scope["path"]
        free = path == OPEN[0] or path.startswith(OPEN[1])
        if self.limits.token is not None and not free and not _same(headers.get("authorization"), self.limits.token):
            raise Refusal(
                401,
                "the token is missing or wrong.",
                "Send the header `Authorization: Bearer TOKEN`. In a browser, enter any user name and the token as the password.",
                {"WWW-Authenticate": 'Basic realm="Backstory", charset="UTF-8"'},
            )

    async def _whole(self, scope: Scope, receive: Receive) -> Receive:
        """The body, read within its bounds, for the application to read again."""
        length = Headers(scope=scope).get("content-length", "0")
        if length.isdecimal() and (len(length) > 18 or int(length) > self.limits.most_bytes):
            raise self._too_large()
        try:
            body = await asyncio.wait_for(self._read(receive), self.limits.body_seconds)
        except TimeoutError:
            raise Refusal(
                400, f"the body did not arrive within {self.limits.body_seconds:g} s.", "Send the request again."
            ) from None
        return _again(body, receive)

    async def _read(self, receive: Receive) -> bytes:
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Refusal(400, "the connection closed before the body was complete.", "Send the request again.")
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self.limits.most_bytes:
                raise self._too_large()
            if not message.get("more_body", False):
                return b"".join(parts)

    def _too_large(self) -> Refusal:
        most = self.limits.most_bytes
        return Refusal(
            413,
            f"the request's body has more than {most:,} bytes.",
            "Send less, or start the service with a larger --max-bytes.",
            {"Connection": "close"},
        )


class _Sender:
    """Adds the headers of every answer, and knows whether one has begun."""

    def __init__(self, send: Send) -> None:
        self._send, self.began = send, False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.began = True
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                headers.setdefault(name, value)
            headers.setdefault("Cache-Control", "no-store")
        await self._send(message)


def _filled(scope: Scope) -> dict[str, bytes]:
    """The query string without fields that a form has sent empty: they mean nothing."""
    parts = [part for part in scope["query_string"].split(b"&") if part.partition(b"=")[2]]
    return {"query_string": b"&".join(parts)}


def _again(body: bytes, receive: Receive) -> Callable[[], Awaitable[Message]]:
    """A receive that gives the body once more, and then whatever comes."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def give() -> Message:
        return waiting.pop() if waiting else await receive()

    return give


def _same(header: str | None, token: str) -> bool:
    """Whether the header carries the token, as Bearer or as the password of Basic, compared in constant time."""
    kind, _, value = (header or "").partition(" ")
    given = value.strip().encode()
    if kind.lower() == "basic":
        try:
            given = base64.b64decode(given, validate=True).partition(b":")[2]
        except (binascii.Error, ValueError):
            return False
    elif kind.lower() != "bearer":
        return False
    return hmac.compare_digest(given, token.encode())
