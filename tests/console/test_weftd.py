"""A real weftd and a real run: while it runs, its page, the API, the SDK and the command line tell the same cost; and
its page shows what the loop logs."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import weft
from click.testing import CliRunner
from playwright.sync_api import expect, sync_playwright
from weft import types
from weft.cli import main

from tests.console.conftest import CHROMIUM, WATCH
from tests.e2e.conftest import BASE_MODEL, Weftd, weftd_command

pytestmark = pytest.mark.server
SAME_SITE = {"sec-fetch-site": "same-origin"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Weftd]:
    server = Weftd(tmp_path_factory.mktemp("weftd")).start()
    yield server
    assert server.stop() == 0, server.log()


def datum(shift: int) -> types.Datum:
    tokens = [5 + shift, 6, 7, 8, 9, 10]
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * 5},
    )


def weftd(server: Weftd, *arguments: str) -> str:
    done = weftd_command(*arguments, "--data-dir", server.data_dir)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_cost_so_far_everywhere(server: Weftd) -> None:
    key = server.key()
    page = httpx.Client(base_url=server.url, headers=SAME_SITE)
    assert page.post("/console/login", data={"key": key}).status_code == 303
    with weft.ServiceClient(base_url=server.url, api_key=key) as service:
        training = service.create_lora_training_client(BASE_MODEL, rank=4).result()
        run = training.model_id
        costs = []
        for step in range(3):
            loss = training.forward_backward([datum(step)] * 4, "cross_entropy").result().metrics["loss:sum"]
            training.optim_step(types.AdamParams(learning_rate=1e-3)).result()
            weft.log(training, {"loss": loss, "reward": step / 10}, step=step)
            usage = training.cost().result()
            assert usage.total_nusd > (costs[-1] if costs else 0)
            costs.append(usage.total_nusd)
            live = page.get(f"/console/runs/{run}/live").json()
            assert live["cost_usd"] == usage.total_usd
            assert live["state"] == "live"
            assert live["optim_steps"] == step + 1
            shown = page.get(f"/console/runs/{run}", headers={"accept": "text/html"}).text
            assert re.search(rf'id="cost"><data class="usd" value="{re.escape(usage.total_usd)}"', shown)
            headers = {"x-api-key": key}
            answer = page.get(f"/api/v1/weft/usage?run_id={run}", headers=headers).json()
            assert answer["total_usd"] == usage.total_usd
        settings = {"WEFT_BASE_URL": server.url, "WEFT_API_KEY": key}
        said = CliRunner().invoke(main, ["cost", run], env=settings, catch_exceptions=False)
        assert usage.total_usd.rstrip("0") in said.stdout.replace(",", "")
        deadline = time.monotonic() + 60
        curves: list[dict[str, object]] = []
        while time.monotonic() < deadline and [curve["points"] for curve in curves] != [3, 3]:
            time.sleep(0.1)
            curves = page.get(f"/console/runs/{run}/live").json()["curves"]
        assert [(curve["name"], curve["steps"]) for curve in curves] == [("loss", [0, 1, 2]), ("reward", [0, 1, 2])]
        assert curves[1]["values"] == [0.0, 0.1, 0.2]
    assert page.get(f"/console/runs/{run}/live").json()["curves"] == curves


def test_a_login_link(server: Weftd) -> None:
    weftd(server, "user", "create", "--org", "acme", "--email", "me@acme.example", "--role", "owner")
    link = weftd(server, "user", "login-link", "--org", "acme", "--email", "me@acme.example", "--url", server.url)
    assert link.startswith(server.url + "/console/login/")
    page = httpx.Client(headers=SAME_SITE, follow_redirects=True)
    assert page.get(link).status_code == 200
    assert "me@acme.example" in page.post(link).text
    assert page.post(link).status_code == 401


@pytest.mark.skipif(not Path(CHROMIUM).exists(), reason=f"needs Chromium at {CHROMIUM}")
def test_the_playground(server: Weftd) -> None:
    """Two models side by side, for two turns, in Chromium under the console's policy; it costs what the API says."""
    key = server.key()
    with weft.ServiceClient(base_url=server.url, api_key=key) as service:
        training = service.create_lora_training_client(BASE_MODEL, rank=4).result()
        path = training.save_weights_for_sampler("played").result().path
    headers = {"x-api-key": key}

    def spent() -> float:
        return float(httpx.get(f"{server.url}/api/v1/weft/usage", headers=headers).json()["total_usd"])

    before = spent()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        context = browser.new_context()
        context.add_init_script(WATCH)
        page = context.new_page()
        wrong: list[str] = []
        page.on("console", lambda m: wrong.append(m.text) if m.type in ("error", "warning") else None)
        page.goto(f"{server.url}/console/login")
        page.get_by_label("API key").fill(key)
        page.keyboard.press("Enter")
        page.wait_for_url("**/console/")
        page.get_by_role("link", name="Playground").click()
        assert page.locator(f"#models option[value='{path}']").count() == 1
        page.get_by_label("Model", exact=True).fill(BASE_MODEL)
        page.get_by_label("Beside it").fill(path)
        page.get_by_label("At most, tokens").fill("12")
        for turn in (1, 2):
            page.get_by_label("Message").fill("What is <b>3</b> + 5?")
            page.get_by_role("button", name="Send").click()
            expect(page.locator(".turn")).to_have_count(turn, timeout=60_000)
            expect(page.get_by_label("Message")).to_have_value("")
        assert page.locator(".turn .said b").count() == 0, "what was typed is text"
        assert page.locator(".drawn").count() == 4
        for shown in page.locator(".drawn span").all():
            first, *others = str(shown.get_attribute("title")).split("\n")
            assert re.fullmatch(r".*: \d+\.\d\d%", first, re.S)
            assert len(others) == 5
        read = [int(text.split()[0]) for text in page.locator(".turn header p").all_inner_texts()]
        assert read[2] > read[0], "the second turn reads the first"
        kept = [json.loads(one.input_value()) for one in page.locator("input[name=history]").all()]
        assert [[said["role"] for said in side] for side in kept] == [["user", "assistant"] * 2] * 2
        costs = [float(str(one.get_attribute("value"))) for one in page.locator(".turn data.usd").all()]
        assert all(cost > 0 for cost in costs)
        assert sum(costs) == pytest.approx(spent() - before, abs=1e-12)
        assert page.evaluate("window.violations") == wrong == []
        page.get_by_label("Beside it").fill("run:nobody's")
        page.get_by_label("Message").fill("Hello?")
        page.get_by_role("button", name="Send").click()
        expect(page.locator(".turn .problem")).to_contain_text("is not there", timeout=60_000)
        cookies = {str(one["name"]): str(one["value"]) for one in context.cookies()}
        browser.close()
    form = {"said": "Hello", "model": BASE_MODEL}
    forged = httpx.post(f"{server.url}/console/playground", data=form, cookies=cookies, headers=SAME_SITE)
    assert forged.status_code == 403
    assert "CSRF" in forged.text
