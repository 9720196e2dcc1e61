"""Names under which this daemon is served, and checks of `Host` and `Origin` by them, for the API and the web page."""

import socket
from typing import Final, NoReturn

from starlette.datastructures import Headers

from gateway.config.origins import is_address, is_loopback, is_same, is_served
from gateway.errors import Forbidden, Misdirected
from gateway.request.routing import LiveConfig
from gateway.telemetry.metrics import Metrics

# Requests of a page at the same origin have one of these values in Sec-Fetch-Site; `none` means that no page made the
# request.
_OWN_SITE: Final = ("same-origin", "none")


class OwnNames:
    """Names under which this daemon is served: the loopback's, `host` and `hosts` of `[server]`, and this machine's own
    unless the daemon listens on the loopback only.

    Programs reach a loopback by its own names. A request under another name comes from a web page whose name was made
    to resolve to the loopback, or from a proxy, whose name has to be in `hosts`.
    """

    def __init__(self, live: LiveConfig, metrics: Metrics) -> None:
        self._live = live
        self._metrics = metrics
        name = socket.gethostname().lower()
        bare = name.removesuffix(".local")
        self._of_machine = (name, bare, f"{bare}.local")

    def check_host(self, headers: Headers, *, takes_addresses: bool = False, advice: str = "") -> None:
        """Refuse a request for a foreign host name. Raises `Misdirected`, whose message ends with `advice`.

        An attacker may resolve such a name to this machine. To the browser, the attacker's page then has the daemon's
        origin. An IP address cannot be made to resolve to another machine, and passes with `takes_addresses`. Without a
        key it must not, because browsers send no `Sec-Fetch-Site` to addresses such as 0.0.0.0.
        """
        server = self._live.config.server
        names = (*server.hosts, server.host, *(() if is_loopback(server.host) else self._of_machine))
        for host in headers.getlist("host"):
            if not is_served(host, names) and not (takes_addresses and is_address(host)):
                self._metrics.auth_failures["host"] += 1
                raise Misdirected(
                    f"mlxd is not served as {host[:200]!r}. Add that name to [server] hosts in mlxd.toml{advice}."
                )

    def is_own_page(self, headers: Headers) -> bool:
        """Whether no web page made the request, or a page at the requested host and port, which `check_host` has
        checked.

        Browsers send no `Origin` for passive content, such as an image.
        """
        origin = headers.get("origin")
        if origin is None:
            return headers.get("sec-fetch-site", "none").lower() in _OWN_SITE
        return is_same(origin, headers.get("host", ""))

    def refuse_page(self, message: str) -> NoReturn:
        """Count a request of a foreign web page, and raise `Forbidden`."""
        self._metrics.auth_failures["origin"] += 1
        raise Forbidden(message)
