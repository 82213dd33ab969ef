"""Losses that the server does not have by name: functions of one datum, traced here and run there in one pass.

    lp   the trainer's logprob, where gradients flow        rho  exp(lp - q), to the sampler
    q    the sampler's                                      k    exp(old - q), trainer to sampler before the step
    old  the trainer's before the step                      r    exp(lp - old), what the steps have done
    A, m advantages, mask (times the loop's weight)         sg   without its gradient

With one optimizer step for each batch `old` is lp itself, without its gradient, and no pass is needed for it; then r is
1 and its clip does nothing. `old=True` reads it from the data, for several steps on one batch. Every loss tells sums
over the positions where m is not 0, whatever it weighs: `custom/tokens:sum`, how many these are, and
`custom/mismatch_kl:sum`, of rho - 1 - log rho; most also `custom/masked:sum`, how many the loss's own mask leaves out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import signature
from math import inf, log
from typing import Any, Literal, ParamSpec

from weft.packages import imported
from weft.rl import checks
from weft.rl.losses.loss import Loss
from weft.wire.checks.losses import MAX_LOG_RATIO, MAX_TOLD_LOG_RATIO

#: A torch tensor, or what stands for it while it is traced.
Tensor = Any
P = ParamSpec("P")
#: Settings that a term is multiplied by, and those that one is divided by, too. Others are bounds.
FACTORS, DIVISORS = ("kl", "rl", "ce", "ref"), ("above", "below")


def _settings(maker: Callable[P, Loss]) -> Callable[P, Loss]:
    """`maker`, where every number of its settings is one that is not negative; an infinite bound bounds nothing."""

    known = signature(maker)

    @wraps(maker)
    def made(*args: P.args, **settings: P.kwargs) -> Loss:
        for name, value in known.bind(*args, **settings).arguments.items():
            own = known.parameters[name].default
            if isinstance(own, tuple):
                if not isinstance(value, tuple | list) or len(value) != len(own):
                    raise TypeError(f"{name} must be as {own}, got {value!r:.80}")
                for place, each in enumerate(value):
                    checks.number(f"{name}[{place}]", each)
            elif name in FACTORS or name in DIVISORS:
                checks.finite(name, value, above=name in DIVISORS)
            elif name != "level" and not (isinstance(own, bool | None) and isinstance(value, type(own))):
                checks.number(name, value)
        return maker(*args, **settings)

    return made


def _torch() -> Any:
    return imported("torch", "this loss is traced with torch: pip install torch (ppo, cispo, ... need none)")


def _result(loss: Tensor, lp: Tensor, q: Tensor, m: Tensor, masked: Tensor | None = None) -> Any:
    torch = _torch()
    on = (m != 0).float()
    log_rho = torch.where(m != 0, lp - q, 0.0).double().clamp(max=MAX_TOLD_LOG_RATIO)
    kl = (torch.expm1(log_rho) - log_rho).sum()
    metrics = {"custom/mismatch_kl:sum": kl, "custom/tokens:sum": on.sum()}
    if masked is not None:
        metrics["custom/masked:sum"] = (on * masked).sum()
    return (m * loss).sum(), metrics


def _with_old(name: str, body: Callable[..., Any], old: bool, sampler: bool = False) -> Loss:
    """`body(lp, q, old, A, m)` as a loss that reads `old`, or takes for it the trainer of this moment, or with
    `sampler` what was sampled from."""
    if old:

        def fn(logprobs: Tensor, q: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Any:
            return body(logprobs, q, old, advantages, mask)

        return Loss(name, _named(fn, name))

    def now(logprobs: Tensor, q: Tensor, advantages: Tensor, mask: Tensor) -> Any:
        return body(logprobs, q, q if sampler else logprobs.detach(), advantages, mask)

    return Loss(name, _named(now, name))


def _named(fn: Callable[..., Any], name: str) -> Callable[..., Any]:
    fn.__name__ = name
    return fn


def _clip(log_r: Tensor, a: Tensor, low: float, high: float, log_k: Tensor | None = None) -> Tensor:
    """PPO's objective, times k if given: min(k r A, k clamp(r) A), which is constant from some r on where A > 0: r
    overflows, and 0 times infinity is no gradient. Where A < 0 nothing bounds it, and that is the user's to hear of;
    but k may be as small as r is large, so their logarithms are added."""
    torch = _torch()
    most = torch.clamp(log_r, max=MAX_LOG_RATIO)
    clamped = torch.clamp(torch.exp(most), 1 - low, 1 + high)
    if log_k is not None:
        clamped, log_r = torch.exp(log_k) * clamped, log_k + log_r
    r = torch.exp(torch.where(a < 0, log_r, torch.clamp(log_r, max=MAX_LOG_RATIO)))
    return torch.minimum(r * a, clamped * a)


def _kept_ratio(log: Tensor, drop: Tensor) -> Tensor:
    """exp(log), and 0 where it is dropped: there it may have overflowed, and 0 times infinity is not 0."""
    return (1 - drop) * _torch().exp((1 - drop) * log)


def _dropped(lp: Tensor, q: Tensor, old: Tensor, a: Tensor, m: Tensor, drop: Tensor, clip: tuple[float, float]) -> Any:
    """The loss -k min(r A, clamp(r) A), and 0 at tokens that `drop` names."""
    gain = _clip((1 - drop) * (lp - old), a, *clip, (1 - drop) * (old - q))
    return _result(-(1 - drop) * gain, lp, q, m, drop)


def _outside(x: Tensor, low: float, high: float) -> Tensor:
    return ((x < low) | (x > high)).float().detach()


@_settings
def intellect3(
    low: float = 0.125, high: float = 8.0, veto: float = 0.0, level: Literal["token", "sequence"] = "token"
) -> Loss:
    """-rho 1[low <= rho <= high] A, and nothing of a rollout in which any rho is below `veto` (INTELLECT-3).

    The bounds are its code's; the report's text has a veto of 1e-5. At level "sequence" rho is that of the whole
    sequence, exp(min(sum log rho, 10)), divided by its length, and each token takes its own share of the gradient.
    """
    checks.one_of("level", level, ("token", "sequence"))
    checks.number("low", low, most=high)

    def fn(logprobs: Tensor, q: Tensor, advantages: Tensor, mask: Tensor) -> Any:
        torch = _torch()
        log_rho = logprobs - q
        on = (mask != 0).float()
        rho = torch.exp(log_rho)
        if level == "sequence":
            whole = torch.exp(torch.clamp((on * log_rho).sum(), max=10.0)).detach()
            rho = whole * torch.exp(logprobs - logprobs.detach())
            drop = _outside(rho, low, high)
            return _result(-(1 - drop) * rho / torch.clamp(on.sum(), min=1.0) * advantages, logprobs, q, mask, drop)
        vetoed = ((on * (rho < veto).float()).sum() > 0).float().detach()
        drop = torch.clamp(_outside(rho, low, high) + vetoed, max=1.0)
        return _result(-_kept_ratio(log_rho, drop) * advantages, logprobs, q, mask, drop)

    return Loss("intellect3", _named(fn, "intellect3"))


@_settings
def icepop(low: float = 0.5, high: float = 5.0, clip: tuple[float, float] = (0.2, 0.2), old: bool = False) -> Loss:
    """-k 1[low <= k <= high] min(r A, clamp(r) A): two ratios (Ring-1T, eq. 1, with its bounds)."""
    checks.number("low", low, most=high)

    def body(lp: Tensor, q: Tensor, old: Tensor, a: Tensor, m: Tensor) -> Any:
        torch = _torch()
        return _dropped(lp, q, old, a, m, _outside(torch.exp(old - q), low, high), clip)

    return _with_old("icepop", body, old)


@_settings
def tis(cap: float = 2.0, clip: tuple[float, float] = (0.2, 0.2), old: bool = False) -> Loss:
    """-min(k, cap) min(r A, clamp(r) A): truncated importance sampling (slime)."""

    def body(lp: Tensor, q: Tensor, old: Tensor, a: Tensor, m: Tensor) -> Any:
        torch = _torch()
        log_k = torch.clamp(old - q, max=log(cap) if cap else -inf)
        return _result(-_clip(lp - old, a, *clip, log_k), lp, q, m, (torch.exp(old - q) > cap).float())

    return _with_old("tis", body, old)


@_settings
def areal(upper: float = 5.0, clip: tuple[float, float] = (0.2, 0.2), old: bool = False) -> Loss:
    """-w 1[w <= upper] min(r A, clamp(r) A) with w = k, the proximal policy over the behaviour's (AReaL, decoupled)."""

    def body(lp: Tensor, q: Tensor, old: Tensor, a: Tensor, m: Tensor) -> Any:
        torch = _torch()
        return _dropped(lp, q, old, a, m, (torch.exp(old - q) > upper).float(), clip)

    return _with_old("areal", body, old)


@_settings
def ppo_clip(low: float = 0.2, high: float = 0.2, dual: float | None = None, old: bool = False) -> Loss:
    """-min(r A, clamp(r, 1 - low, 1 + high) A), and with `dual` at most dual |A| where A < 0 (slime)."""

    def body(lp: Tensor, q: Tensor, old: Tensor, a: Tensor, m: Tensor) -> Any:
        torch = _torch()
        if dual is None:
            return _result(-_clip(lp - old, a, low, high), lp, q, m)
        gain = _clip(torch.clamp(lp - old, max=MAX_LOG_RATIO), a, low, high)
        gain = torch.where(a < 0, torch.maximum(gain, dual * a), gain)
        return _result(-gain, lp, q, m)

    return _with_old("ppo_clip", body, old)


@_settings
def clipped_is(low: float = 0.0, high: float = 4.0, old: bool = False) -> Loss:
    """-sg(clamp(r, low, high)) A lp: CISPO on r; `cispo` has it on rho (arXiv 2506.13585; slime)."""
    checks.number("low", low, most=high)

    def body(lp: Tensor, q: Tensor, old: Tensor, a: Tensor, m: Tensor) -> Any:
        torch = _torch()
        return _result(-torch.clamp(torch.exp(lp - old), low, high).detach() * a * lp, lp, q, m)

    return _with_old("clipped_is", body, old)


@_settings
def gspo(low: float = 3e-4, high: float = 4e-4, old: bool = False) -> Loss:
    """-min(s A, clamp(s, 1 - low, 1 + high) A), s = exp(mean of lp - q): one ratio for all tokens (arXiv 2507.18071).

    With `old` the ratio is to that."""

    def body(lp: Tensor, q: Tensor, to: Tensor, a: Tensor, m: Tensor) -> Any:
        torch = _torch()
        on = (m != 0).float()
        log_s = (on * (lp - to)).sum() / torch.clamp(on.sum(), min=1.0)
        return _result(-_clip(log_s, a, low, high), lp, q, m, _outside(torch.exp(log_s), 1 - low, 1 + high))

    return _with_old("gspo_sequence", body, old, sampler=True)


def _kept(lp: Tensor, q: Tensor, signal: Tensor, m: Tensor, drop: Tensor, kl: float) -> Any:
    """-(1 - drop) signal rho + kl (log rho)^2."""
    log_rho = lp - q
    term = -_kept_ratio(log_rho, drop) * signal + kl * log_rho * log_rho
    return _result(term, lp, q, m, drop)


@_settings
def dppo_kl(low: float = 0.2, high: float = 0.2, kl: float = 1e-3) -> Loss:
    """-keep A rho + kl (log rho)^2; keep ends where a probability has moved by 0.2 in its advantage's direction.

    prime-rl's default. A = 0 counts as negative, as there."""

    def fn(logprobs: Tensor, q: Tensor, advantages: Tensor, mask: Tensor) -> Any:
        torch = _torch()
        moved = (torch.exp(logprobs) - torch.exp(q)).detach()
        drop = (((advantages > 0) & (moved > high)) | ((advantages <= 0) & (moved < -low))).float()
        return _kept(logprobs, q, advantages, mask, drop, kl)

    return Loss("dppo_kl", _named(fn, "dppo_kl"))


@_settings
def ipo(width: float = 0.1, kl: float = 1e-3) -> Loss:
    """As `dppo_kl`, with a mask of both directions at once: |exp(lp) - exp(q)| <= width (prime-rl)."""

    def fn(logprobs: Tensor, q: Tensor, advantages: Tensor, mask: Tensor) -> Any:
        torch = _torch()
        drop = (torch.abs(torch.exp(logprobs) - torch.exp(q)) > width).float().detach()
        return _kept(logprobs, q, advantages, mask, drop, kl)

    return Loss("ipo", _named(fn, "ipo"))


@_settings
def ref_kl(low: float = 0.2, kl: float = 1e-3) -> Loss:
    """-keep sg(ref - lp) rho + kl (log rho)^2: towards a teacher, token by token (prime-rl's distillation)."""

    def fn(logprobs: Tensor, q: Tensor, ref: Tensor, mask: Tensor) -> Any:
        return _towards(logprobs, q, ref, mask, low, kl)

    return Loss("ref_kl", _named(fn, "ref_kl"), all_data=True)


def _towards(lp: Tensor, q: Tensor, ref: Tensor, m: Tensor, low: float, kl: float) -> Any:
    torch = _torch()
    drop = (torch.exp(lp) - torch.exp(q) < -low).float().detach()
    return _kept(lp, q, (ref - lp).detach(), m, drop, kl)


@_settings
def sapo(above: float = 1.0, below: float = 1.05, old: bool = False) -> Loss:
    """-(4 / tau) sigmoid(tau (r - 1)) A, tau `above` for A > 0 and `below` for the rest: a soft clip (AReaL's SAPO)."""

    def body(lp: Tensor, q: Tensor, old: Tensor, a: Tensor, m: Tensor) -> Any:
        torch = _torch()
        positive = (a > 0).float()
        tau = above * positive + below * (1 - positive)
        r = torch.exp(torch.clamp(lp - old, max=MAX_LOG_RATIO))
        return _result(-(4 / tau) * torch.sigmoid(tau * (r - 1)) * a, lp, q, m)

    return _with_old("sapo", body, old)


@_settings
def opsm(most: float = 1e-4, old: bool = False) -> Loss:
    """-r A, and nothing of a sequence with A < 0 whose mean of old - lp is above `most` (slime's OPSM).

    `old` is the sampler where it is not read."""

    def body(lp: Tensor, q: Tensor, old: Tensor, a: Tensor, m: Tensor) -> Any:
        on = (m != 0).float()
        apart = ((on * (old - lp)).sum() / on.sum() > most) & ((on * a).sum() < 0)
        drop = apart.float().detach()
        return _result(-_kept_ratio(lp - old, drop) * a, lp, q, m, drop)

    return _with_old("opsm", body, old, sampler=True)


@_settings
def mixed(rl: float = 1.0, ce: float = 0.0, ref: float = 0.0) -> Loss:
    """rl (DPPO + KL) + ce (-lp) + ref (reference KL) in one pass, each times its own weight.

    With `ref` the data need the input of that name."""
    policy = dppo_kl().fn
    assert policy is not None

    def plain(logprobs: Tensor, q: Tensor, advantages: Tensor, mask: Tensor) -> Any:
        loss, metrics = policy(logprobs, q, advantages, mask)
        return rl * loss - ce * (mask * logprobs).sum(), metrics

    def taught(logprobs: Tensor, q: Tensor, ref: Tensor, advantages: Tensor, mask: Tensor) -> Any:
        loss, metrics = plain(logprobs, q, advantages, mask)
        return loss + weight * _towards(logprobs, q, ref, mask, 0.2, 1e-3)[0], metrics

    weight = ref
    return Loss("mixed", _named(taught if ref else plain, "mixed"), all_data=bool(ce or ref))
