"""`python -m smoke --model NAME --out FILE`, with TINKER_BASE_URL and TINKER_API_KEY set."""

from __future__ import annotations

import argparse
import faulthandler
import json
import time
from pathlib import Path

import tinker
from smoke import commands, rest, sampling, service, training, weights
from smoke.record import Tour


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--model", required=True)
    options.add_argument("--out", required=True, type=Path)
    chosen = options.parse_args()
    faulthandler.dump_traceback_later(240, exit=True)
    tour = Tour()
    start = time.perf_counter()
    try:
        walk(tour, chosen.model)
    finally:
        found = {"version": tinker.__version__, "seconds": round(time.perf_counter() - start, 1), "calls": tour.results}
        chosen.out.write_text(json.dumps(found, indent=1))


def walk(tour: Tour, model: str) -> None:
    client = tinker.ServiceClient()
    manager = service.first(tour, client, model)
    service.refusals(tour, client)
    run = training.train(tour, client, model)
    service.custom_loss(tour, client, run)
    paths = weights.save(tour, client, run)
    sampling.sample(tour, client, run, model, paths["sampler"])
    sampling.stable(tour, client, run, model)
    rest.manage(tour, manager, run, paths, model)
    weights.download(tour, manager, client, run, paths)
    commands.command_line(tour, run.model_id, paths, model)
    service.asynchronous(tour, model)
    service.close(tour, client)


if __name__ == "__main__":
    main()
