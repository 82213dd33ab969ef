"""Settings from the environment: WEFT_TRAINER__THREADS is `threads` in `[trainer]`; outside of sections only settings
that hold passwords can be set. A variable that nobody reads is refused by name, like an unknown key of the file."""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Collection, Sequence
from typing import Any

#: Settings outside of sections that may come from the environment: they hold passwords.
FROM_ENVIRONMENT = {
    "database_url": "WEFT_DATABASE_URL",
    "redis_url": "WEFT_REDIS_URL",
    "blob_url": "WEFT_BLOB_URL",
    "server_secret": "WEFT_SERVER_SECRET",
}


#: Further variables that are no settings: secrets read where they are used, and variables of the client, of
#: deploy/compose.yaml and of the tests.
_ELSEWHERE = {
    *(
        "WEFT_OIDC_CLIENT_SECRET",
        "WEFT_OIDC_CLIENT_SECRET_FILE",
        "WEFT_STRIPE_SECRET_KEY",
        "WEFT_STRIPE_SECRET_KEY_FILE",
    ),
    *("WEFT_STRIPE_WEBHOOK_SECRETS", "WEFT_STRIPE_WEBHOOK_SECRETS_FILE"),
    *("WEFT_BASE_URL", "WEFT_API_KEY", "WEFT_PROJECT_ID", "WEFT_TAGS", "WEFT_CACHE_DIR"),
    *("WEFT_BUCKET", "WEFT_DATABASE_PASSWORD", "WEFT_SOAK"),
}
#: Variables that Kubernetes sets for a service: those of a service called weft begin like ours.
_OF_KUBERNETES = re.compile(r"_SERVICE_(HOST|PORT(_\w+)?)$|_PORT_\d+_(TCP|UDP|SCTP)(_\w+)?$")


class SettingsError(ValueError):
    """The settings cannot be used; the message is one line for the operator."""

    exit_code = 2


class Unreachable(SettingsError):
    """What the settings name does not answer; it may do so later."""

    exit_code = 1


def from_environment(settings: Collection[str]) -> dict[str, Any]:
    """The settings in the environment: those in `settings` by name, and those of their sections. Raises
    SettingsError."""
    values: dict[str, Any] = {
        name: os.environ[variable] for name, variable in FROM_ENVIRONMENT.items() if os.environ.get(variable)
    }
    for variable, text in os.environ.items():
        if not text or not variable.startswith("WEFT_"):
            continue
        if "__" not in variable:
            _refuse_unknown(variable, text, settings)
            continue
        *sections, name = variable.removeprefix("WEFT_").lower().split("__")
        found: Any = {name: _value(text)}
        for section in reversed(sections):
            found = {section: found}
        values = over(values, found)
    return values


def variable_of(place: Sequence[str | int], environment: Any, file: Any) -> str | None:
    """The variable that set the value at this place; None if the file did, which takes precedence."""
    names: list[str] = []
    for name in place:
        if not isinstance(environment, dict) or name not in environment:
            break
        environment, file = environment[name], file.get(name) if isinstance(file, dict) else None
        if file is not None and not isinstance(file, dict):
            return None
        names.append(str(name))
    if not names or isinstance(environment, dict):
        return None
    return FROM_ENVIRONMENT.get(names[0]) or "WEFT_" + "__".join(names).upper()


def _refuse_unknown(variable: str, text: str, settings: Collection[str]) -> None:
    """Raise SettingsError for a variable that nobody reads, with the most similar one that exists."""
    known = {*FROM_ENVIRONMENT.values(), *_ELSEWHERE}
    if variable in known or _OF_KUBERNETES.search(variable) or (variable.endswith("_PORT") and "://" in text):
        return
    setting = variable.removeprefix("WEFT_").lower()
    if setting in settings:
        what = (
            f"{setting} cannot be set by the environment; put it into the file of --config, or see weftd serve --help"
        )
    else:
        near = difflib.get_close_matches(variable, known, 1, 0.75)  # all begin alike
        what = f"there is no such variable{f'; is {near[0]} meant?' if near else ''}"
    raise SettingsError(f"{variable}: {what} (docs/operating.md)")


def _value(text: str) -> Any:
    """A value as in the file; words need no quotes."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


def over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Both settings merged, key by key and section by section; `above` takes precedence."""
    values = {**below, **above}
    for name in below.keys() & above.keys():
        if isinstance(below[name], dict) and isinstance(above[name], dict):
            values[name] = over(below[name], above[name])
    return values
