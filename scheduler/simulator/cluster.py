"""The simulated machines: how long they take, and what they cost.

The defaults are what the case studies publish for a model of about 100 B parameters on H100: 816 trained tokens/s and
GPU; replicas of 8 GPUs that decode 21 sequences at 48 tokens/s each, bound by memory, so that more sequences slow each
other little.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cluster:
    """`replicas` generators of `slots` sequences each, and `trainers` that take passes, each of `ranks` GPUs.

    A decode step takes `decode_s` + `decode_s_per_sequence` for each sequence of a replica; a prompt token takes as
    long as 1 / `prefill_speed` decoded ones of its sequence. A slot that has come free is idle for `handover_s` before
    it decodes another request. The front takes one request at a time, each for `front_s`: half on its way in, half on
    its answer's way out. A client needs `turnaround_s` more from its last answer to its next request, and what it asks
    of the trainer comes there one request after the other, `request_s` apart: a trainer that has nothing to do begins
    with the first alone. The defaults leave these four out: beside sequences of minutes they are nothing.

    A pass takes `pass_s` for each of its stages (one, unless a run has several steps in it), `slice_s` for each slice
    and `light_s` for each step or save (nothing beside large ones), and then as long as its tokens and their attention,
    or as `gather_s` for each stage: the layers that each of several ranks receives of the others, the next while one
    computes (docs/production.md, "How large a pass"). Attention takes a GPU `pair_s` for each pair of tokens of one
    sequence, which are its length squared; the defaults have that in what a token takes. Where ranks own the experts
    nothing is gathered: a trainer takes `travel_s` more for each token on its way to its experts and back, and
    `adapter_s` for the experts' factors of each run of a stage."""

    replicas: int = 22
    gpus_per_replica: int = 8
    slots: int = 64
    decode_s: float = 0.018
    decode_s_per_sequence: float = 0.00014
    prefill_speed: float = 400.0
    handover_s: float = 0.0
    front_s: float = 0.0
    turnaround_s: float = 0.0
    request_s: float = 0.0
    trainers: int = 1
    ranks: int = 80
    trained_tokens_per_s_per_gpu: float = 816.0
    pass_s: float = 0.2
    slice_s: float = 0.0
    light_s: float = 0.0
    pair_s: float = 0.0
    gather_s: float = 0.0
    travel_s: float = 0.0
    adapter_s: float = 0.0
    pass_tokens: int = 131_072
    slice_tokens: int = 1024
    gpu_hour_usd: float = 1.59

    @classmethod
    def of(cls, gpus: int, trainer_share: float = 0.3) -> Cluster:
        """A cluster of `gpus` GPUs, about `trainer_share` of them for one trainer. Few GPUs are a small server, with
        one GPU for each replica."""
        each = 8 if gpus >= 32 else 1
        replicas = max(1, min(round(gpus * (1 - trainer_share) / each), (gpus - 1) // each))
        return cls(replicas=replicas, gpus_per_replica=each, ranks=max(1, gpus - replicas * each))

    @property
    def all_slots(self) -> int:
        return self.replicas * self.slots

    @property
    def gpus(self) -> int:
        return self.replicas * self.gpus_per_replica + self.trainers * self.ranks

    def step_s(self, sequences: int) -> float:
        """The time of one decode step of a replica with this many sequences."""
        return self.decode_s + self.decode_s_per_sequence * sequences

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all generators, with every slot busy."""
        return self.all_slots / self.step_s(self.slots)

    def pass_takes_s(
        self, tokens: float, stages: float = 1, slices: float = 0, light: float = 0, pairs: float = 0, runs: float = 0
    ) -> float:
        """How long a pass takes one trainer, in seconds. `runs`: the runs with data, summed over the stages."""
        computed_s = (tokens / self.trained_tokens_per_s_per_gpu + pairs * self.pair_s) / self.ranks
        computed_s = max(stages * self.gather_s, computed_s)
        travelling_s = tokens * self.travel_s + runs * self.adapter_s
        return stages * self.pass_s + slices * self.slice_s + light * self.light_s + computed_s + travelling_s
