"""Where Stripe's keys are read from, and that no error or setting shows them."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import SecretStr

from billing.payments.client import KEY, WEBHOOK_SECRETS, stripe_secrets
from store.load_settings import load_settings
from store.settings import PaymentsSettings, SettingsError

SETTINGS = PaymentsSettings(
    enabled=True, secret_key=SecretStr("rk_test_settings"), webhook_secrets=[SecretStr("whsec_s")]
)


def test_the_environment_wins_over_files_and_files_over_settings(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("rk_test_file\n")
    environment = {f"{KEY}_FILE": str(file)}
    assert stripe_secrets(SETTINGS, {}).key.get_secret_value() == "rk_test_settings"
    assert stripe_secrets(SETTINGS, environment).key.get_secret_value() == "rk_test_file"
    assert stripe_secrets(SETTINGS, environment | {KEY: "rk_test_env"}).key.get_secret_value() == "rk_test_env"
    both = stripe_secrets(SETTINGS, {WEBHOOK_SECRETS: "whsec_a,whsec_b"}).webhook_secrets
    assert [secret.get_secret_value() for secret in both] == ["whsec_a", "whsec_b"]


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({KEY: "sk_live_planted"}, "unrestricted live key"),
        ({KEY: "pk_live_planted"}, "must begin with rk_"),
        ({KEY: "rk_x", WEBHOOK_SECRETS: "planted1 planted2 planted3"}, "3 webhook secrets"),
        ({f"{KEY}_FILE": "/nowhere/planted"}, "cannot read the file"),
    ],
)
def test_what_is_refused_is_not_repeated(environment: dict[str, str], message: str) -> None:
    with pytest.raises(SettingsError, match=message) as caught:
        stripe_secrets(SETTINGS, environment)
    assert "planted" not in str(caught.value)


def test_an_empty_secret_is_none() -> None:
    """Everybody could sign with it."""
    settings = SETTINGS.model_copy(update={"webhook_secrets": [SecretStr("")]})
    with pytest.raises(SettingsError, match="0 webhook secrets"):
        stripe_secrets(settings, {})


def test_nothing_at_all(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=KEY):
        stripe_secrets(PaymentsSettings(enabled=True), {})


def test_settings_do_not_show_them(tmp_path: Path) -> None:
    (tmp_path / "weft.toml").write_text(
        'data_dir = "."\n[payments]\nsecret_key = "rk_test_planted"\nwebhook_secrets = ["whsec_planted"]\n'
    )
    settings = load_settings(tmp_path / "weft.toml")
    for shown in (repr(settings), str(settings), settings.model_dump_json()):
        assert "planted" not in shown
