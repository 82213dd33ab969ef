"""Pictures of the console for docs/console.md: `python -m tests.console.screenshots [FOLDER]`.

Pages of a seeded service in Chromium, light, dark and on a telephone; palettes of 128 colours keep them small.
"""

from __future__ import annotations

import io
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

from api.console.sessions import new_link
from tests.console.conftest import CHROMIUM, Console, served

FOLDER = Path(__file__).parent.parent.parent / "docs" / "images"
WIDE = {"width": 1280, "height": 860}
GUEST = "guest@acme.example"
NARROW = {"width": 375, "height": 780}

#: Name, page, colour scheme, size.
SHOTS = (
    ("console-audit", "/audit", "dark", WIDE),  # before all the others sign in
    ("console-overview", "/", "light", WIDE),
    ("console-usage", "/usage?by=project", "light", WIDE),
    ("console-run", "/runs/{run}", "dark", WIDE),
    ("console-runs", "/runs", "light", WIDE),
    ("console-compare", "/compare?run={run}&run={other}", "light", WIDE),
    ("console-search", "/runs?#search", "dark", WIDE),
    ("console-checkpoints", "/checkpoints", "light", WIDE),
    ("console-queues", "/queues", "light", WIDE),
    ("console-playground", "/playground", "light", WIDE),
    ("console-keys", "/keys", "light", WIDE),
    ("console-members", "/members", "dark", WIDE),
    ("console-budgets", "/budgets", "light", WIDE),
    ("console-billing", "/billing", "light", WIDE),
    ("console-overview-dark", "/", "dark", WIDE),
    ("console-ownership", "/ownership", "light", WIDE),
    ("console-overview-mobile", "/", "light", NARROW),
    ("console-run-mobile", "/runs/{run}", "dark", NARROW),
    ("console-runs-mobile", "/runs", "light", NARROW),
)


def everywhere(console: Console) -> list[str]:
    """Every page that an operator sees, with something on it."""
    runs = console.made.runs
    pages = ["/", "/usage", "/usage?by=run", "/runs", f"/runs/{runs[0]}", f"/runs/{runs[-1]}", "/compare"]
    pages += [f"/compare?run={runs[0]}&run={runs[3]}", f"/compare?run={'&run='.join(runs[:5])}", "/checkpoints"]
    pages += ["/queues", "/playground", "/keys", "/members", "/budgets", "/billing", "/audit", "/ownership"]
    headers = {"x-api-key": console.made.keys["owner"]}
    made = console.http.post("/api/v1/weft/invitations", json={"role": "viewer", "email": GUEST}, headers=headers)
    return [*pages, "/join/" + made.json()["link"].rpartition("/")[2]]


def sign_in_as_operator(page: Page, console: Console) -> None:
    made = console.made
    link = console.database.write_now(
        lambda session: new_link(session, made.org_id, made.users["owner"], operator=True)
    )
    page.goto(f"{console.url}/console/login/{link}")
    page.keyboard.press("Enter")
    page.wait_for_url("**/console/")


def sign_in(page: Page, console: Console, role: str = "owner") -> None:
    page.goto(f"{console.url}/console/login")
    page.get_by_label("API key").fill(console.made.keys[role])
    page.keyboard.press("Enter")
    page.wait_for_url("**/console/")


def take(console: Console, folder: Path, only: str = "") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for name, path, scheme, size in SHOTS:
            if only not in name:
                continue
            context = browser.new_context(viewport=size, color_scheme=scheme, reduced_motion="reduce")
            page = context.new_page()
            if path == "/ownership":
                sign_in_as_operator(page, console)
            else:
                sign_in(page, console)
            runs = console.made.runs
            page.goto(f"{console.url}/console{path.format(run=runs[0], other=runs[3])}")
            page.wait_for_load_state("networkidle")
            if path.endswith("#search"):
                page.keyboard.press("Control+k")
                page.keyboard.type("grpo")
                page.locator(".hit", has_text="step-200 of gsm8k-grpo").wait_for()
                page.wait_for_load_state("networkidle")
            save(page.screenshot(), folder / f"{name}.png")
            context.close()
        browser.close()


def save(png: bytes, path: Path) -> None:
    picture = Image.open(io.BytesIO(png)).convert("RGB").quantize(128, dither=Image.Dither.NONE)
    picture.save(path, optimize=True)
    print(f"{path} {path.stat().st_size // 1000} kB")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as data, served(Path(data), tidy=True) as here:
        take(here, Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER, sys.argv[2] if len(sys.argv) > 2 else "")
