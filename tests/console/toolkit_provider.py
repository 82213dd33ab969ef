"""An OpenID provider by Django OAuth Toolkit: it uses oauthlib and jwcrypto, the console uses Authlib and joserfc.

    python toolkit_provider.py PORT SECRET REDIRECT_URI PEOPLE

PEOPLE is JSON: the claims of each person, by name. /sign-in/NAME is its sign-in page, which asks for no password.
"""
# ruff: noqa: E402  Django wants to be set up before its models are imported.

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import django
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from django.conf import settings

PORT, SECRET, REDIRECT_URI = sys.argv[1:4]
PEOPLE = json.loads(sys.argv[4])
ISSUER = f"http://localhost:{PORT}/o"
KEY = rsa.generate_private_key(65537, 2048).private_bytes(
    serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
)
FOLDER = tempfile.TemporaryDirectory()
settings.configure(
    SECRET_KEY="of tests",
    PASSWORD_HASHERS=["django.contrib.auth.hashers.MD5PasswordHasher"],  # a secret of tests; others take a second
    ALLOWED_HOSTS=["localhost"],
    ROOT_URLCONF=__name__,
    USE_TZ=True,
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": Path(FOLDER.name, "provider.db")}},
    INSTALLED_APPS=[f"django.contrib.{name}" for name in ("auth", "contenttypes", "sessions")] + ["oauth2_provider"],
    MIGRATION_MODULES=dict.fromkeys(("auth", "contenttypes", "sessions", "oauth2_provider")),  # tables as they are now
    MIDDLEWARE=[
        "django.contrib.sessions.middleware.SessionMiddleware",
        "django.contrib.auth.middleware.AuthenticationMiddleware",
    ],
    OAUTH2_PROVIDER={
        "OIDC_ENABLED": True,
        "OIDC_ISS_ENDPOINT": ISSUER,
        "OIDC_RSA_PRIVATE_KEY": KEY.decode(),
        "OAUTH2_VALIDATOR_CLASS": f"{__name__}.Validator",
        "SCOPES": {"openid": "", "email": "", "profile": ""},
    },
)
django.setup()

from django.contrib.auth import get_user_model, login
from django.core.management import call_command
from django.core.servers.basehttp import run
from django.core.wsgi import get_wsgi_application
from django.http import HttpRequest, HttpResponse
from django.urls import include, path
from oauth2_provider.models import get_application_model
from oauth2_provider.oauth2_validators import OAuth2Validator


class Validator(OAuth2Validator):  # type: ignore[misc]
    oidc_claim_scope = None

    def get_additional_claims(self, request: Any) -> dict[str, Any]:
        return dict(PEOPLE[request.user.username])


def sign_in(request: HttpRequest, name: str) -> HttpResponse:
    login(request, get_user_model().objects.get(username=name))
    return HttpResponse(name)


urlpatterns = [
    path("sign-in/<name>", sign_in),
    path("o/", include("oauth2_provider.urls", namespace="oauth2_provider")),
]

if __name__ == "__main__":
    call_command("migrate", run_syncdb=True, verbosity=0)
    for name in PEOPLE:
        get_user_model().objects.create_user(name)
    get_application_model().objects.create(
        client_id="weft",
        client_secret=SECRET,
        client_type="confidential",
        authorization_grant_type="authorization-code",
        redirect_uris=REDIRECT_URI,
        algorithm="RS256",
        skip_authorization=True,
    )
    run("127.0.0.1", int(PORT), get_wsgi_application(), threading=True)
