"""What MkDocs is told of the documentation beyond mkdocs.yml, as a hook of it: `make docs`.

Pages under docs/ are read on a code host, too, so they have nothing that only a site understands. Here they get links
where they name each other (`docs/billing.md`), and beside them come the pages of the reference, made from the client's
docstrings.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import weft
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from weft import rl

#: The name of a page in running text: its path in the checkout.
NAMED = re.compile(r"(?<![\[(/\w])`?docs/((?:[a-z-]+/)?[a-z-]+\.md)`?")

#: The names of `weft` that are shown, by title.
OF_WEFT = {
    "Clients": "ServiceClient TrainingClient SamplingClient RestClient AdminClient APIFuture LossHandle RetryPolicy",
    "Plans": "Plan PlannedSample PlannedTrain PlannedUpdate PlannedSave CostEstimate Problem",
}
#: The names of `weft.types` that are shown, by the module that has them.
TYPES = {
    "inputs": "Datum ModelInput EncodedTextChunk",
    "tensor": "TensorData",
    "training": "AdamParams DimuonParams LoraConfig ForwardBackwardOutput OptimStepResponse GetInfoResponse",
    "sampling": "SamplingParams SampleResponse SampledSequence",
    "weights": "SaveWeightsResponse SaveWeightsForSamplerResponse",
    "account.usage": "UsageResponse",
}
#: The parts of `weft.rl` that are shown, by title: packages with their public names, and whole modules.
PACKAGES = {
    "Loops": "loops",
    "Supervised": "supervised",
    "Environments": "envs",
    "Chat": "chat",
    "Rollouts": "rollout",
    "Schedules": "schedule",
    "Advantages": "signal",
    "Tasks": "tasks",
}
MODULES = {"Losses": "losses", "Filters": "signal.filters", "Length penalties": "signal.lengths"}
TWINS = "For every method `x` that asks the server there is `x_async`, with the same arguments."


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the reference."""
    for name, text in {"clients": clients(), "types": types(), "rl": rl_page()}.items():
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Turn the names of pages into links."""
    up = "../" * page.file.src_uri.count("/")
    return "\n".join(
        text if code else NAMED.sub(rf"[\1]({up}\1)", text) for text, code in lines_of(markdown.splitlines())
    )


def lines_of(lines: Iterable[str]) -> Iterable[tuple[str, bool]]:
    """Each line of a text, and whether it is code."""
    fenced = False
    for line in lines:
        mark = line.lstrip().startswith("```")
        fenced ^= mark
        yield line, fenced or mark or line.startswith("    ")


def clients() -> str:
    """The page of the names that `import weft` offers."""
    parts = ["# weft", TWINS]
    for title, names in OF_WEFT.items():
        parts += [f"## {title}", *(_shown(f"{weft._HOMES[name]}.{name}") for name in names.split())]
    return "\n\n".join([*parts, "## Errors", _shown("weft.errors", whole=True)])


def types() -> str:
    """The page of `weft.types`."""
    names = [f"weft.wire.{module}.{name}" for module, names in TYPES.items() for name in names.split()]
    return "\n\n".join(["# Types", "Of `weft.types`; also there as `weft.NAME`.", *map(_shown, names)])


def rl_page() -> str:
    """The page of `weft.rl`."""
    parts = ["# weft.rl", "[Reinforcement learning](../rl.md) shows how they go together."]
    for title, package in PACKAGES.items():
        homes = {module: names for module, names in rl._HOMES.items() if module.split(".")[0] == package}
        names = [f"weft.rl.{module}.{name}" for module, names in homes.items() for name in names.split()]
        parts += [f"## {title}", *map(_shown, names)]
    for title, module in MODULES.items():
        parts += [f"## {title}", _shown(f"weft.rl.{module}", whole=True)]
    return "\n\n".join(parts)


def _shown(name: str, *, whole: bool = False) -> str:
    """The directive that mkdocstrings replaces by a name's docstrings; for a whole module by its members'."""
    options = "\n    options:\n      show_root_heading: false\n      show_root_toc_entry: false" if whole else ""
    return f"::: {name}{options}"
