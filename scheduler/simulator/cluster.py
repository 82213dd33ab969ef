"""The simulated machines: how long their work takes, and what they cost.

The defaults are what the case studies publish for a model of about 100 B parameters on H100: 816 trained tokens/s per
GPU, and replicas of 8 GPUs that decode 21 sequences at 48 tokens/s each. Decoding is bound by memory, so more sequences
slow each other little.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cluster:
    """The sizes of the simulated machines, and the seconds that work takes on them.

    Sizes. There are `replicas` generators with `slots` sequences each, and `trainers`, each a group of `ranks` GPUs.

    Generators. A decode step takes `decode_s`, and `decode_s_per_sequence` more for each sequence of the replica. A
    prompt token takes as long as 1 / `prefill_speed` decoded tokens. A slot that has
    come free is idle for `handover_s` before its next request.

    Front and clients. The front handles one request at a time, each for `front_s`: half when the request comes, half
    when its answer leaves. A client needs `turnaround_s` more between its last answer and its next request. Its
    requests to the trainer arrive one by one, `request_s` apart, so an idle trainer begins with the first alone.
    `handover_s` and these three are 0 by default: they do not matter if sequences take minutes.

    Trainers. A pass has one stage, or more if a run has several steps in it, and takes the sum of:

        pass_s      for each stage
        slice_s     for each slice
        light_s     for each step or save; little beside large slices, so 0 by default
        computing   the time of its tokens (`trained_tokens_per_s_per_gpu`) and of their attention, on all ranks
                    together; or gather_s for each stage, if that is longer
        travel_s    for each token, if ranks own the experts: to the experts and back
        adapter_s   for each run of a stage, if ranks own the experts: its experts' factors

    Attention takes one GPU `pair_s` for each pair of tokens of a sequence, of which there are its length squared; the
    default 0 leaves it to the time of tokens. `gather_s` is the time in which ranks that share the base receive each
    other's layers, the next layer while one computes (docs/production.md, "How large a pass"); 0 if ranks own the
    experts, since then nothing is gathered."""

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
