"""What happens when something dies or is damaged: docs/recovery.md."""

from __future__ import annotations

from statistics import median

from bench.tables.grids import read, table


def pauses() -> str:
    """The pauses in the bench with one client: each death, and whether its longest pause met the goal."""
    found = read("chaos-idle")
    rows = []
    for each in found["found"]:
        longest = max(each["pauses_s"])
        listens = f"{median(each['listens_s']):.1f} s" if each["listens_s"] else ""
        times = (f"{median(each['pauses_s']):.1f} s", f"{longest:.1f} s", f"{each['goal_s']:.0f} s")
        kept = "yes" if longest <= each["goal_s"] else "no"
        rows.append((each["name"], len(each["pauses_s"]), *times, kept, listens))
    head = ("killed", "tries", "median pause", "longest", "goal", "holds", "the address answers after")
    return table(found, head, rows)


def kills(name: str) -> str:
    found = read(f"chaos-{name}")
    rows = []
    for each in found["found"]:
        times = each["pauses_s"]
        shown = (f"{median(times):.1f} s", f"{max(times):.1f} s") if times else ("", "")
        counts = (each["answers"], each["differences"], len(each["errors"]), each["misbilled"])
        rows.append((each["name"], len(times), *shown, *(f"{count:,}" for count in counts)))
    head = ("killed", "kills", "median pause", "longest", "answers compared", "differences", "errors")
    return table(found, (*head, "billed twice or never"), rows)


def damage() -> str:
    found = read("chaos-damage")
    rows = []
    for each in found["found"]:
        answers = f"{each['right']}, {each['wrong']}, {each['none']}"
        client, operator = ((each[who] or [""])[-1].replace("|", "/") for who in ("client", "operator"))
        rows.append((each["name"], *(("", each["skipped"], "") if each["skipped"] else (answers, client, operator))))
    head = ("damage", "answers after it: right, wrong, none", "clients were told", "the operator was told")
    return table(found, head, rows).replace("---:", "---")
