"""What many tenants get from one service, and what it costs."""

from __future__ import annotations

from bench.tables.grids import claims, grid, number, numbers, read, table


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
    return table(found, ("", "one tenant", "eight tenants"), rows)


def ledger() -> str:
    found = read("ledger")
    names = ("sqlite", "postgresql")
    of, claimed = [found[name] for name in names], {each["name"]: each["value"] for each in found["claims"]}
    shares = [format(claimed[f"{name}: share of a sample's time, alone"], ".1%") for name in names]
    settled = f"accepted and settled a second, {found['in_flight']} in flight"
    rows = [
        (settled, *numbers(each["settled_per_s"] for each in of), "2,000"),
        ("added to one of many, by the clock, ms", *numbers(each["added_ms"]["many"] for each in of), "1"),
        ("added to one that is alone, by the clock, ms", *numbers(each["added_ms"]["one"] for each in of), "1"),
        ("the same in processor time of Weft's process, ms", *numbers(each["added_cpu_ms"]["one"] for each in of), ""),
        (f"share of a sample of 32 tokens ({found['sample_ms']:.0f} ms), alone", *shares, "2 %"),
    ]
    return table(found, ("", "SQLite", "PostgreSQL", "goal"), rows)


def neighbour() -> str:
    found = read("neighbour")
    alone = found["alone_p95_s"]
    most = {operation: max(3.0, 1 + found["pass_s"] / alone[operation]) for operation in alone}
    rows = []
    for name, each in found["attacks"].items():
        waits = [each["p95_s"][operation] / alone[operation] for operation in ("forward_backward", "sample")]
        rows.append((f"`{name}`", *numbers((*waits, each["healthz_s"], max(0.0, each["growth_mb"])))))
    head = ("attack, ten at once", "p95 of forward_backward / alone", "of sample / alone")
    goal = ("allowed", number(most["forward_backward"]), number(most["sample"]), "0.5", "300")
    return table(found, (*head, "longest /healthz, s", "MB more"), [*rows, goal])


def console() -> str:
    found = read("console")
    kinds = ("median_ms", "longest_ms", "cpu_ms", "drawn_ms")
    rows = [
        (name, *(number(each[kind]) if kind in each else "" for kind in kinds)) for name, each in found["pages"].items()
    ]
    goal = f"{found['claims'][0]['target']}"
    head = ("page", "median, ms", "longest, ms", "processor, ms", "drawn, ms")
    return table(found, head, [*rows, ("goal", goal, "", "", goal)])


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
        parts.append(table(found, ("off by", *next(iter(rows.values()))), lines))
    return "\n\n".join(parts)


def leader() -> str:
    columns = {"apart": "the load on other cores", "together": "the load on the same two cores"}
    found, sums = {name: part for place, name in columns.items() if (part := read("leader")[place])}, []
    for part in found.values():
        ms, led = part["cpu_ms_per_operation"], ("leader", "redis", "postgresql")
        sums.append(ms | {", ".join(led): sum(ms[who] for who in led), "all": sum(ms.values())})
    rows = [("operations a second", *numbers(part["operations_per_s"] for part in found.values()))]
    if all("led_cores" in part for part in found.values()):
        for who, name in (("ours", "our processes"), ("others", "others"), ("idle", "nobody")):
            used = (f"{part['led_cores'][who]:.2f}" for part in found.values())
            rows.append((f"of the two cores, used by {name}", *used))
        allowed = numbers(part["cpu_allows_per_s"] for part in found.values())
        rows.append(("operations a second that leader, Redis and PostgreSQL have processor time for", *allowed))
    rows += [(f"CPU ms of an operation: {who}", *(f"{of[who]:.3f}" for of in sums)) for who in sums[0]]
    missing = [f"Not measured, {read('leader')['not_measured']}."] if len(found) < len(columns) else []
    return "\n\n".join([claims("leader"), *missing, grid(("", *found), rows)])
