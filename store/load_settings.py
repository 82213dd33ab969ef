"""Settings from the environment, a TOML file and the command line; the later one wins."""

from __future__ import annotations

import reprlib
import tomllib
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from store.environment import SettingsError, from_environment, over, variable_of
from store.settings import Settings

#: How many bytes of a config file are read. A device may have no end.
MAX_CHARACTERS = 1 << 20
#: Kinds of errors about numbers, booleans, and choices.
_SHOWN = ("greater_than", "less_than", "int_", "float_", "bool_", "finite_number", "literal_error")


def load_settings(config_file: Path | None, **overrides: Any) -> Settings:
    """Settings from the environment and the file, which takes precedence, with `overrides` (None: not given) on top.
    Folders come back absolute; in the file they are relative to the file's own folder. Raises SettingsError with one
    line that names the key."""
    environment = from_environment(Settings.model_fields)
    file = _read(config_file) if config_file is not None else {}
    values = over(environment, file)
    within = ("engine", "trainers", "trainer_ranks")  # keys of a section
    values.update({name: value for name, value in overrides.items() if value is not None and name not in within})
    asked = [("trainer", "replicas", overrides.get("trainers")), ("trainer", "ranks", overrides.get("trainer_ranks"))]
    asked.append(("generator", "replicas", list(overrides.get("engine") or ()) or None))
    for section, field, value in asked:
        if value is not None and isinstance(values.get(section, {}), dict):  # otherwise it is refused below
            values[section] = {**values.get(section, {}), field: value}
    try:
        settings = Settings.model_validate(values)
    except ValidationError as error:
        # A missing key is often caused by an unknown (misspelt) one.
        first = min(error.errors(), key=lambda found: found["type"] != "extra_forbidden")
        where = variable_of(first["loc"], environment, file)
        if where is None:
            source = f"{config_file}: " if config_file is not None else ""
            where = source + ".".join(map(str, first["loc"]))
        raise SettingsError(f"{where}: {_in_words(first)}") from None
    return settings.model_copy(
        update={
            "data_dir": settings.data_dir.expanduser().absolute(),
            "models": {name: path.expanduser().absolute() for name, path in settings.models.items()},
        }
    )


def _in_words(fault: ErrorDetails) -> str:
    """The text that says what is wrong with a setting and, if known, what to write instead."""
    *sections, name = map(str, fault["loc"] or ("",))
    if fault["type"] == "missing" and fault["loc"] == ("data_dir",):
        return "is missing: name the folder with the service's data, here or by --data-dir"
    if fault["type"] != "extra_forbidden":
        return fault["msg"].removeprefix("Value error, ") + _got(fault)
    known = Settings.model_fields
    for section in sections:
        kind = known[section].annotation if section in known else None
        known = kind.model_fields if isinstance(kind, type) and issubclass(kind, BaseModel) else {}
    near = get_close_matches(name, known, 1)
    return "there is no such setting; " + (f"did you mean {near[0]}?" if near else "docs/operating.md lists all")


def _got(fault: ErrorDetails) -> str:
    """The value, if the kind of error shows that it is neither a secret nor a table."""
    value = fault["input"]
    if not fault["type"].startswith(_SHOWN) or not isinstance(value, str | int | float):
        return ""
    huge = isinstance(value, int) and abs(value) >= 2**128  # Python refuses to print a number of thousands of digits
    return "" if huge else f", got {reprlib.repr(value)}"


def _read(config_file: Path) -> dict[str, Any]:
    try:
        with config_file.open() as file:
            text = file.read(MAX_CHARACTERS + 1)
        if len(text) > MAX_CHARACTERS:
            raise ValueError(f"it has more than {MAX_CHARACTERS} characters: name a file of settings")
        values = tomllib.loads(text)
    except OSError as error:
        raise SettingsError(f"cannot read the config file {config_file}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # a number of 4,300 digits; deeply nested lists
        raise SettingsError(f"{config_file} is not TOML: {error}") from None
    folder = config_file.absolute().parent
    if isinstance(values.get("data_dir"), str):
        values["data_dir"] = folder / Path(values["data_dir"]).expanduser()
    models = values.get("models")
    if isinstance(models, dict):
        values["models"] = {
            name: folder / Path(path).expanduser() if isinstance(path, str) else path for name, path in models.items()
        }
    return values
