"""The server's own settings: one table beside the engine's, and what makes a set of them valid.

Owns `ServerSettings` and how environment variables fill any settings table. The command line is `api/cli`'s; who may do
what with these credentials is `api/auth`'s. Called by `app.py` through `api/cli`.
"""

from __future__ import annotations

import ipaddress
import shlex
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, fields, replace
from typing import Any

from engine.config import is_switch, setting
from engine.errors import AppError

ENVIRONMENT_PREFIX = "SWITCHBOARD_"
# Names that other servers use for the same setting; Switchboard's own name wins where both are set.
ENVIRONMENT_ALIASES = {
    "api_key": "VLLM_API_KEY",
    "allow_runtime_lora_updating": "VLLM_ALLOW_RUNTIME_LORA_UPDATING",
    # Where Gradio's hosts, Hugging Face Spaces above all, tell an app to listen.
    "host": "GRADIO_SERVER_NAME",
    "port": "GRADIO_SERVER_PORT",
}
# The same for settings that take several items, each variable with what its text needs in front to be one.
ENVIRONMENT_ITEMS = {
    "lora_resolver": (("VLLM_LORA_RESOLVER_CACHE_DIR", "local:"), ("VLLM_LORA_RESOLVER_HF_REPO_LIST", "hub:")),
}


class ConfigFault(AppError):
    """A flag or an environment variable is wrong, or contradicts another; the program ends with exit code 2."""

    code = "invalid_configuration"


@dataclass(frozen=True, repr=False)
class ServerSettings:
    """How the server listens and whom it answers; frozen once `resolve` has checked it."""

    host: str = setting("127.0.0.1", "address to listen on", metavar="HOST")
    port: int = setting(7860, "port to listen on; 0 takes any free one", parse=int, metavar="PORT")
    root_path: str = setting("", "path prefix that a proxy in front strips, such as /studio", metavar="PATH")
    api_key: str | None = setting(
        None, "key that clients send as a bearer token, or as the password of HTTP basic login", metavar="KEY"
    )
    admin_key: str | None = setting(
        None, "key that loading, unloading and uploading adapters need; it opens everything else too", metavar="KEY"
    )
    auth: str | None = setting(None, "user and password of HTTP basic login", metavar="USER:PASS")
    tenants: str | None = setting(
        None,
        "JSON file of further keys, as hashes: role, adapters, requests and tokens a minute of each; read again when it changes",
        metavar="FILE",
    )
    insecure: bool = setting(False, "start without any credential on an address that is not a loopback one")
    allowed_origins: list[str] = setting(
        [], "sites whose pages may call the API from a browser (CORS); * is any", nargs="+", metavar="ORIGIN",
        shown_default="none",
    )  # fmt: skip
    allowed_media_domains: list[str] = setting(
        [], "hosts from which media may be fetched that a message gives by http address; * is any public host", nargs="+",
        metavar="HOST", shown_default="none",
    )  # fmt: skip
    audit_log: str | None = setting(
        None, "file that gets a JSON line for each change of an adapter; the log has them too", metavar="FILE"
    )
    allow_runtime_lora_updating: bool | None = setting(
        None, "let clients load, unload and upload adapters", shown_default="on for a loopback host, off otherwise"
    )
    max_queued_requests: int = setting(
        512, "requests that may wait; further ones are answered 429", parse=int, metavar="N"
    )
    request_timeout: float = setting(
        600.0,
        "longest time for one request, a whole recording too, from its arrival to its end; 0 is no limit",
        parse=float,
        metavar="SECONDS",
    )
    drain_seconds: float = setting(
        5.0, "how long answers under way may take to end after Ctrl-C", parse=float, metavar="SECONDS"
    )
    log_level: str = setting("info", "debug, info, warning or error", metavar="LEVEL")

    def __repr__(self) -> str:
        """Without the credentials, so that no log line can hold them."""
        shown = (f"{row.name}={getattr(self, row.name)!r}" for row in fields(self) if row.name not in _SECRETS)
        return f"ServerSettings({', '.join(shown)})"

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        return is_loopback_host(self.host)

    @property
    def has_credentials(self) -> bool:
        """Whether anything but `/health` needs a credential."""
        return any((self.api_key, self.admin_key, self.auth, self.tenants))

    def resolve(self) -> ServerSettings:
        """Check every value and work out the defaults that depend on others; raises `ConfigFault`."""
        for name in (*_SECRETS, "tenants", "audit_log"):
            if getattr(self, name) == "":
                raise ConfigFault(f"{_flag(name)} is empty; leave it out or give it a value.", param=name)
        if self.auth is not None and not all(self.auth.partition(":")):
            raise ConfigFault("--auth is not of the form USER:PASS; write for example --auth ana:secret.", param="auth")
        if self.admin_key is not None and self.admin_key == self.api_key:
            raise ConfigFault(
                "--admin-key equals --api-key, which makes every client an administrator; choose another, or leave "
                "--admin-key out if that is what you want.",
                param="admin_key",
            )
        if not (self.is_loopback or self.has_credentials or self.insecure):
            raise ConfigFault(
                f"{self.host or 'every address'} is not a loopback address, so other machines may reach the server, and no "
                "credential is set; set --api-key, --admin-key, --auth or --tenants, or say --insecure.",
                param="host",
            )
        if not 0 <= self.port <= 65535:
            raise ConfigFault(f"--port is {self.port}, but must be between 0 and 65535.", param="port")
        if self.max_queued_requests < 1:
            raise ConfigFault(
                f"--max-queued-requests is {self.max_queued_requests}, but must be 1 or more.",
                param="max_queued_requests",
            )
        if not 0 <= self.request_timeout <= 86400:
            raise ConfigFault(
                f"--request-timeout is {self.request_timeout}, but must be between 0 (no limit) and 86400.",
                param="request_timeout",
            )
        if not 0 <= self.drain_seconds <= 3600:
            raise ConfigFault(
                f"--drain-seconds is {self.drain_seconds}, but must be between 0 and 3600.", param="drain_seconds"
            )
        if self.log_level not in ("debug", "info", "warning", "error"):
            raise ConfigFault(
                f"--log-level is {self.log_level!r}, but must be debug, info, warning or error.", param="log_level"
            )
        return replace(self, root_path=self._clean_root_path(), allow_runtime_lora_updating=self._may_update())

    def _clean_root_path(self) -> str:
        stripped = self.root_path.strip("/")
        if any(letter in stripped for letter in "?# "):
            raise ConfigFault(
                f"--root-path is {self.root_path!r}, but must be a plain path such as /studio.", param="root_path"
            )
        return f"/{stripped}" if stripped else ""

    def _may_update(self) -> bool:
        if self.is_loopback:
            return self.allow_runtime_lora_updating is not False
        if self.allow_runtime_lora_updating and self.admin_key is None and self.tenants is None:
            raise ConfigFault(
                f"adapters cannot be changed at run time on {self.host}, which is not a loopback address, without a "
                "credential for it; set --admin-key or --tenants, or drop --allow-runtime-lora-updating.",
                param="allow_runtime_lora_updating",
            )
        return bool(self.allow_runtime_lora_updating)


_SECRETS = ("api_key", "admin_key", "auth")


def is_loopback_host(host: str) -> bool:
    """Whether an address to listen on is reachable from this machine alone."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def environment_values(
    table: type, environ: Mapping[str, str], special: Mapping[str, Callable[[str], Any]] | None = None
) -> dict[str, Any]:
    """What the environment sets of a settings table: field name -> parsed value.

    A row `max_loras` is read from `SWITCHBOARD_MAX_LORAS`; an empty variable counts as absent. Rows that take several
    words are split like a shell command. `special` maps a field to what parses its whole text. Raises `ConfigFault`.
    """
    values = {}
    for row in fields(table):
        names = (ENVIRONMENT_PREFIX + row.name.upper(), ENVIRONMENT_ALIASES.get(row.name, ""))
        name = next((name for name in names if environ.get(name)), None)
        if name is not None:
            parse = (special or {}).get(row.name) or _variable_parser(row)
            try:
                values[row.name] = parse(environ[name])
            except (ValueError, ArgumentTypeError) as error:
                raise ConfigFault(f"the environment variable {name} is wrong: {error}.", param=row.name) from error
            continue
        items = [prefix + environ[name] for name, prefix in ENVIRONMENT_ITEMS.get(row.name, ()) if environ.get(name)]
        if items:
            values[row.name] = items
    return values


def _variable_parser(row: Field[Any]) -> Callable[[str], Any]:
    if is_switch(row):
        return _parse_switch
    parse: Callable[[str], Any] = row.metadata["parse"]
    if row.metadata["nargs"]:
        return lambda text: [parse(word) for word in shlex.split(text)]
    return parse


def _parse_switch(text: str) -> bool:
    """The words that vLLM takes, and their kin."""
    word = text.strip().lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off"):
        return False
    raise ValueError(f"{text!r} is neither 1, true, yes, on nor 0, false, no, off")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
