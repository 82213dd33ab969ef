"""The modules that the forking process imports (`tests.forked`)."""

# ruff: noqa: F401
import alembic.command
import tinker.cli.__main__
import torch._dynamo  # torch's own, when it first computes shapes only

import api.cli
import api.server.app
import api.server.listener
import api.server.serve
import migrations.upgrade
import tests.billing.money.spender
import tests.truth.rank
import tests.workers.trainer.ranks.worlds
import workers.generator.process
import workers.trainer.process
