"""What the commands print: one function per answer of the server, from model to table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from itertools import groupby
from typing import TYPE_CHECKING, Any

from weft.money import usd

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from weft.wire.account.limits import BalanceResponse, PricesResponse
    from weft.wire.account.money import BudgetsResponse, LedgerResponse
    from weft.wire.account.usage import UsageResponse, UsageRow
    from weft.wire.health import RunHealthResponse
    from weft.wire.rest import CheckpointsListResponse, TrainingRunsResponse
    from weft.wire.service import GetServerCapabilitiesResponse


def console(width: int | None = None) -> Console:
    """Without markup and emoji: a run id is not markup, and the `:train:` in it is not an emoji."""
    from rich.console import Console

    return Console(emoji=False, markup=False, highlight=False, width=width)


def _table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def usage(answer: UsageResponse) -> Table:
    """A line per run and kind, a sum per run that has several, and the total."""
    table = _table("run", "model", "kind", "tokens", "USD", right=("tokens", "USD"))
    table.caption = f"prices: {answer.price_version}"
    table.caption_justify = "left"
    rows = sorted(answer.rows, key=lambda row: (row.run_id or "", row.base_model, row.kind))
    for run_id, group in groupby(rows, key=lambda row: row.run_id):
        own = list(group)
        for index, row in enumerate(own):
            name = (run_id or "(no run)") if index == 0 else ""
            table.add_row(name, row.base_model, row.kind, _quantity(row), usd(row.amount_nusd))
        if len(own) > 1:
            table.add_row("", "", "sum", *_sums(own), style="dim")
    table.add_section()
    table.add_row("total", "", "", f"{sum(row.tokens for row in rows):,}", usd(answer.total_nusd), style="bold")
    return table


def _quantity(row: UsageRow) -> str:
    return f"{row.byte_hours / 10**9:,.3f} GB h" if row.kind == "storage" else f"{row.tokens:,}"


def _sums(rows: list[UsageRow]) -> tuple[str, str]:
    return f"{sum(row.tokens for row in rows):,}", usd(sum(row.amount_nusd for row in rows))


def balance(answer: BalanceResponse) -> Table:
    table = _table("", "USD", right=("USD",))
    table.add_row(f"spent in {answer.month} (UTC)", usd(answer.spent_this_month_nusd))
    table.add_row("spent ever", usd(answer.spent_nusd))
    table.add_row("held for running operations", usd(answer.held_nusd))
    if answer.balance_nusd is None or answer.available_nusd is None:
        table.add_row("balance", "none kept: usage is metered, not prepaid", style="bold")
        return table
    table.add_row("balance", usd(answer.balance_nusd))
    if answer.overdraft_nusd:
        table.add_row("may be owed", usd(answer.overdraft_nusd))
    table.add_row("available", usd(answer.available_nusd), style="bold")
    return table


def budgets(answer: BudgetsResponse) -> Table:
    table = _table(
        "of", "period", "limit", "spent", "held", "left", "reached", right=("limit", "spent", "held", "left")
    )
    for row in answer.budgets:
        of = "organisation" if row.scope == "org" else f"{row.scope} {row.scope_id}"
        when = f"{row.period_start:%Y-%m}" if row.period == "month" else "total"
        amounts = [usd(amount) for amount in (row.limit_nusd, row.spent_nusd, row.held_nusd, row.left_nusd)]
        reached = ", ".join(f"{alert.pct}%" for alert in row.alerts)
        table.add_row(of, when if row.hard else f"{when} (soft)", *amounts, reached)
    return table


def ledger(answer: LedgerResponse) -> Table:
    table = _table("at", "type", "USD", "of", "memo", right=("USD",))
    for row in answer.entries:
        table.add_row(_when(row.at), row.type, usd(row.amount_nusd), f"{row.ref_type} {row.ref_id}", row.memo)
    return table


def prices(answer: PricesResponse) -> Table:
    table = _table("kind", "USD per million tokens", right=("USD per million tokens",))
    for kind, rate in answer.rates_uusd_per_mtok.items():
        table.add_row(kind, f"{rate // 10**6}.{rate % 10**6:06d}")
    table.caption = f"{answer.base_model}, prices: {answer.price_version}"
    table.caption_justify = "left"
    return table


def models(answer: GetServerCapabilitiesResponse) -> Table:
    table = _table("model", "context", "train", "sample", right=("context",))
    for model in answer.supported_models:
        context = f"{model.max_context_length:,}" if model.max_context_length else ""
        table.add_row(model.model_name or "", context, _yes(model.trainable), _yes(model.sampleable))
    return table


def _yes(value: bool | None) -> str:
    return "" if value is None else "yes" if value else "no"


def runs(answer: TrainingRunsResponse) -> Table:
    table = _table("name", "run", "model", "rank", "last request", "last checkpoint", "continued from", right=("rank",))
    for run in answer.training_runs:
        last = run.last_checkpoint.checkpoint_id if run.last_checkpoint else ""
        rank = "" if run.lora_rank is None else str(run.lora_rank)
        when, continued = _when(run.last_request_time), run.continued_from or ""
        table.add_row(_plain(run.name or ""), run.training_run_id, run.base_model, rank, when, last, continued)
    shown, total = len(answer.training_runs), answer.cursor.total_count
    table.caption = f"{shown} of {total}" if shown < total else None
    return table


def _plain(text: str) -> str:
    """Text that a colleague has chosen, without what a terminal would obey."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in text)


def checkpoints(answer: CheckpointsListResponse) -> Table:
    table = _table("path", "kind", "size", "saved", "expires", right=("size",))
    for checkpoint in answer.checkpoints:
        size = "" if checkpoint.size_bytes is None else f"{checkpoint.size_bytes / 2**20:.1f} MiB"
        expires = _when(checkpoint.expires_at) if checkpoint.expires_at else "never"
        table.add_row(checkpoint.tinker_path, checkpoint.checkpoint_type, size, _when(checkpoint.time), expires)
    return table


def _when(moment: datetime) -> str:
    return moment.astimezone().strftime("%Y-%m-%d %H:%M")


def health(answer: RunHealthResponse) -> Table:
    table = _table("health", "value", right=("value",))
    staleness = ", ".join(f"{steps}: {count}" for steps, count in sorted(answer.staleness.items()))
    for name, value in (
        ("looked back", f"{answer.window_s:,.0f} s"),
        ("trainer waits", f"{answer.trainer_wait:.1%}"),
        ("generator slots busy", f"{answer.generator_occupancy:.1%}"),
        ("own sequences in flight", f"{answer.sequences_in_flight:.1f}"),
        ("sampled", f"{answer.sampled_tokens:,} ({answer.sampled_tokens_per_s:,.1f}/s)"),
        ("trained", f"{answer.trained_tokens:,} ({answer.trained_tokens_per_s:,.1f}/s)"),
        ("trained / sampled", f"{answer.acceptance:.2f}"),
        ("sampled, not trained", "not known" if answer.untrained_tokens is None else f"{answer.untrained_tokens:,}"),
        ("staleness, steps: tokens", staleness or "none yet"),
        ("queued, p50 and p95", f"{answer.queue_p50_s:.2f} s, {answer.queue_p95_s:.2f} s"),
        ("samples wait", "not known" if answer.sampling_wait is None else f"{answer.sampling_wait:.1%}"),
        ("now", answer.stall.sentence),
    ):
        table.add_row(name, value)
    return table


def stats(answer: Mapping[str, Any]) -> Table:
    table = _table("statistic", "value", right=("value",))
    for name, value in _flat(answer):
        table.add_row(name, f"{value:,.4g}" if isinstance(value, float) else str(value))
    return table


def _flat(answer: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """A nested dict as one dict: keys joined by dots, members of a list named by their index."""
    for name, value in answer.items():
        nested = dict(enumerate(value)) if isinstance(value, list) else value
        if isinstance(nested, Mapping):
            yield from _flat({str(key): inner for key, inner in nested.items()}, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
