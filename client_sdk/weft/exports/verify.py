"""Whether the adapter in this folder, as the transformers and peft installed here load it, is the one on the server.

    python verify.py [--base FOLDER OR NAME OF THE BASE MODEL]

It compares log-probabilities of a short text with those that the server gave at the download (reference.json). Some
versions load parts of an adapter and do not say so: the numbers do. Exit status: 0 the same, 1 not, 2 it could not be
tried. `weft verify FOLDER` runs this file too; it needs torch, transformers and peft, and nothing of Weft.
"""

from __future__ import annotations

import argparse
import json
import os
import ssl
import sys
import urllib.error
import urllib.request
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

#: Mean differences up to here are rounding, also in bfloat16 on the one side.
ROUNDING = 0.004
#: A Hub that has not answered within this is taken to be away.
HUB_S = 5.0
#: How large a part of the adapter's effect may be missing. An adapter without its experts misses half and more.
SHARE = 0.1


class CannotTry(Exception):
    """The comparison cannot be made; the message says what is missing and what to do."""


def mean_difference(ours: list[float], theirs: list[float]) -> float:
    """The mean of the absolute differences; infinite where one is not a number."""
    found = sum(abs(a - b) for a, b in zip(ours, theirs, strict=True)) / len(ours)
    return found if found == found else float("inf")


def verdict(ours: list[float], reference: dict[str, Any]) -> tuple[bool, str]:
    """True if `ours` agree with the server's log-probabilities, and a sentence that says how far."""
    theirs, base = reference["logprobs"], reference["base_logprobs"]
    off, effect = mean_difference(ours, theirs), mean_difference(base, theirs)
    numbers = f"log-probabilities of {len(ours)} tokens are off by {off:.4f} on average"
    change = f"the adapter itself changes them by {effect:.4f}"
    if off > max(ROUNDING, SHARE * effect):
        return False, f"WRONG: {numbers}; {change}. Parts of it were not loaded, or the base model is another one."
    if effect <= ROUNDING:
        return True, f"OK as far as one can see: {numbers}, but {change}, so that a missing part would not show."
    return True, f"OK: {numbers}; {change}."


def installed() -> str:
    """The installed versions of the packages that load the adapter."""
    found = []
    for name in ("transformers", "peft", "torch"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            raise CannotTry(f"{name} is not installed here: pip install torch transformers peft") from None
    return ", ".join(found)


def hub_answers(address: str) -> bool:
    """True if anything answers at `address`, be it with an error."""
    try:
        urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=HUB_S).close()
    except urllib.error.HTTPError:
        return True
    except OSError as error:  # certificates are read from elsewhere than the Hub's client reads them
        return isinstance(getattr(error, "reason", None), ssl.SSLError)
    return True


def ask_the_hub(base: str) -> None:
    """Say that `base` comes from the Hub. One that is away is not asked: its client would try again for a minute."""
    address = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    if hub_answers(address):
        print(f"{base} is asked of the Hub; --base names a folder that has it", flush=True)
    else:
        print(f"{address} does not answer: {base} is looked for among what was fetched before", flush=True)
        os.environ["HF_HUB_OFFLINE"] = "1"


def loaded_logprobs(folder: Path, base: str, tokens: list[int]) -> list[float]:
    """The log-probability of each token but the first, with base model and adapter in float32."""
    if not Path(base).is_dir():
        if base.startswith((".", "/", "~")):  # transformers takes it for a name on the Hub
            raise CannotTry(f"there is no folder {base}: --base is the base model's folder, or its name on the Hub")
        ask_the_hub(base)  # before its client is imported, which reads the environment then

    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    except (OSError, ValueError) as error:
        why = str(error).partition("\n")[0]
        raise CannotTry(
            f"the base model {base!r} cannot be loaded; --base names another place, as a folder: {why}"
        ) from None
    model = PeftModel.from_pretrained(model, str(folder)).eval()
    given = torch.tensor([tokens])
    with torch.no_grad():
        logprobs = torch.log_softmax(model(given).logits[0, :-1].float(), -1)
    found: list[float] = logprobs.gather(1, given[0, 1:, None])[:, 0].tolist()
    return found


def verify(folder: Path, base: str | None = None) -> tuple[bool, str]:
    """Load the adapter in `folder` and compare. Raises `CannotTry`."""
    file = folder / "reference.json"
    if not file.is_file():
        raise CannotTry(f"{file} is not there: `weft download` writes it, unless told not to or not allowed to ask")
    print(installed(), flush=True)
    try:
        reference = json.loads(file.read_text())
        return verdict(loaded_logprobs(folder, base or reference["base_model"], reference["tokens"]), reference)
    except CannotTry:
        raise
    # damaged files, and versions of peft or transformers that cannot load the adapter at all
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        raise CannotTry(f"it could not be tried with these files and versions: {said}") from None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", help="folder or hub name of the base model")
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).resolve().parent)
    given = parser.parse_args()
    try:
        right, sentence = verify(given.folder, given.base)
    except CannotTry as error:
        print(error, file=sys.stderr)
        return 2
    print(sentence)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
