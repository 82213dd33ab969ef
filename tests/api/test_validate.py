"""The checks before anything is accepted: each row is one mistake and what its error must say."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, strategies as st
from weft.money import usd
from weft.wire import AdamParams, LimitsResponse, LoraConfig, OptimStepRequest, SampleRequest
from weft.wire.binary.train_codec import TrainBatch

from api.checks.batches import check_batch
from api.checks.limits import limits_of
from api.checks.optimizers import check_step, family_of
from api.checks.runs import check_lora, check_metadata, check_sequence, check_text, check_ttl
from api.checks.samples import check_sample
from api.errors import Invalid, Malformed
from api.paths import CheckpointPath, check_name, parse_path
from scheduler.order.plans import Slice, slices
from store.settings import Limits
from tests.api.conftest import MODEL
from tests.api.data import batch, datum
from workers.model.card import ModelCard


@pytest.fixture
def limits(card: ModelCard) -> LimitsResponse:
    settings = Limits(max_data=4, max_tokens_per_op=40, max_num_samples=4, max_stop_sequences=2)
    return limits_of({MODEL: card}, settings)


RL: dict[str, Any] = {"weights": None, "logprobs": [0.0, -1.0], "advantages": [1.0, 1.0]}


def rl(**changes: Any) -> Any:
    inputs = RL | changes
    return datum([1, 2], **{k: v if v is None else np.array(v, dtype=np.float32) for k, v in inputs.items()})


class TestBatches:
    GOOD: ClassVar[dict[str, TrainBatch]] = {
        "one token": batch("r", 1, [datum([1])]),
        "context length": batch("r", 1, [datum([1] * 16)]),
        "negative weights": batch("r", 1, [datum([1, 2], weights=np.array([-1.5, 0.25], dtype=np.float32))]),
        "two targets": batch(
            "r", 1, [datum([1, 2], target_tokens=[[1, 2], [3, 4]], weights=np.ones((2, 2), dtype=np.float32))]
        ),
        "importance_sampling": batch("r", 1, [rl()], loss_fn="importance_sampling"),
        "ppo with thresholds": batch(
            "r", 1, [rl()], loss_fn="ppo", loss_fn_config={"clip_low_threshold": 0.5, "clip_high_threshold": 2.0}
        ),
    }

    @pytest.mark.parametrize("case", GOOD)
    def test_good(self, case: str, limits: LimitsResponse) -> None:
        assert check_batch(self.GOOD[case], limits, MODEL) == [len(d.tokens) for d in self.GOOD[case].data]

    BAD: ClassVar[dict[str, tuple[TrainBatch, str]]] = {
        "no data": (batch("r", 1, []), "empty"),
        "too many data": (batch("r", 1, [datum([1])] * 5), r"5 data, the limit is 4"),
        "empty datum": (batch("r", 1, [datum([1]), datum([])]), "datum 1: model_input is empty"),
        "too long": (batch("r", 1, [datum([1] * 17)]), r"datum 0: model_input has 17 tokens.*16"),
        "too many tokens": (batch("r", 1, [datum([1] * 16)] * 3), r"48 tokens, the limit is 40"),
        "token beyond vocabulary": (
            batch("r", 1, [datum([1]), datum([1, 100], target_tokens=[1, 1])]),
            r"datum 1: model_input holds token 100 at position 1.*0 to 99",
        ),
        "target beyond vocabulary": (
            batch("r", 1, [datum([1, 2], target_tokens=[2, 100])]),
            r"datum 0: target_tokens holds token 100 at position 1",
        ),
        "negative target": (batch("r", 1, [datum([1], target_tokens=[-1])]), "datum 0.*-1"),
        "fewer weights": (
            batch("r", 1, [datum([1, 2]), datum([1, 2], weights=np.ones(1, dtype=np.float32))]),
            r"datum 1: 'weights'",
        ),
        "fewer targets": (batch("r", 1, [datum([1, 2], target_tokens=[1])]), "datum 0.*target_tokens"),
        "NaN weight": (
            batch("r", 1, [datum([1, 2], weights=np.array([1, np.nan], dtype=np.float32))]),
            "datum 0: 'weights'.*nan",
        ),
        "infinite advantage": (
            batch("r", 1, [rl(), rl(advantages=[1.0, np.inf])], loss_fn="ppo"),
            "datum 1: 'advantages'.*inf",
        ),
        "no logprobs": (batch("r", 1, [rl(logprobs=None)], loss_fn="importance_sampling"), "datum 0.*logprobs"),
        "no targets": (batch("r", 1, [datum([1], target_tokens=None)]), "datum 0.*target_tokens"),
        "unknown loss": (batch("r", 1, loss_fn="sft"), "sft.*cross_entropy"),
        "unknown config": (batch("r", 1, loss_fn_config={"beta": 1.0}), "beta"),
        "text in the config": (batch("r", 1, [rl()], loss_fn="ppo", loss_fn_config={"clip_low_threshold": "x"}), "'x'"),
        "targets that are no integers": (
            batch("r", 1, [datum([1], target_tokens=np.array([1.0], dtype=np.float32))]),
            "datum 0: 'target_tokens' must be integers",
        ),
    }

    @pytest.mark.parametrize("case", BAD)
    def test_bad(self, case: str, limits: LimitsResponse) -> None:
        bad, says = self.BAD[case]
        with pytest.raises(Invalid, match=says):
            check_batch(bad, limits, MODEL)

    def test_slices(self) -> None:
        assert slices([5, 5, 20, 1], 10) == [Slice(0, 2, 10), Slice(2, 3, 20), Slice(3, 4, 1)]
        assert slices([3], 10) == [Slice(0, 1, 3)]

    @given(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.integers(1, 40))
    def test_slices_tile_the_data(self, lengths: list[int], cap: int) -> None:
        cuts = slices(lengths, cap)
        assert [i for cut in cuts for i in range(cut.start, cut.stop)] == list(range(len(lengths)))
        assert all(cut.tokens == sum(lengths[cut.start : cut.stop]) for cut in cuts)
        assert all(cut.tokens <= cap or cut.stop - cut.start == 1 for cut in cuts)


#: For a prompt of three tokens.
TARGETS: dict[str, Any] = {"data": [1, 2], "dtype": "int64", "shape": [2, 1]}


class TestSamples:
    def request(self, params: dict[str, Any] | None = None, tokens: Any = (1, 2, 3), **fields: Any) -> SampleRequest:
        chunks = [{"type": "encoded_text", "tokens": list(tokens)}]
        whole = {"prompt": {"chunks": chunks}, "sampling_params": params or {}} | fields
        return SampleRequest.model_validate(whole)

    @pytest.mark.parametrize(
        ("tokens", "max_tokens", "most"),
        [([1] * 3, 5, 5), ([1] * 3, None, 14), ([1] * 3, 1000, 14), ([1] * 16, 1, 1), ([1] * 16, None, 1)],
    )
    def test_generation_ends_at_the_context_length(
        self, limits: LimitsResponse, tokens: list[int], max_tokens: int | None, most: int
    ) -> None:
        assert check_sample(self.request({"max_tokens": max_tokens}, tokens), limits, MODEL) == most

    @pytest.mark.parametrize("stop", [None, [], "a", ["a", "b"], [1, 99]])
    def test_every_form_of_stop(self, limits: LimitsResponse, stop: Any) -> None:
        check_sample(self.request({"stop": stop}), limits, MODEL)

    BAD: ClassVar[dict[str, tuple[dict[str, Any], dict[str, Any], str]]] = {
        "empty prompt": ({}, {"tokens": []}, "prompt: empty"),
        # the words by which agents' proxies, as the cookbook's, know that a conversation has to be shortened
        "long prompt": ({}, {"tokens": [1] * 17}, "prompt is too long: 17 tokens.*16"),
        "token beyond vocabulary": ({}, {"tokens": [1, 100]}, "token 100 at position 1.*0 to 99"),
        "too many samples": ({}, {"num_samples": 5}, "1 to 4, got 5"),
        "top_k 0": ({"top_k": 0}, {}, "top_k.*got 0"),
        "top_k beyond what is computed": ({"top_k": 2**31}, {}, "top_k.*got 2147483648"),
        "too many stops": ({"stop": ["a", "b", "c"]}, {}, "3 entries, the limit is 2"),
        "long stop": ({"stop": "a" * 257}, {}, r"stop\[0\]: has 257 characters; it must have 1 to 256"),
        "empty stop": ({"stop": ["a", ""]}, {}, r"stop\[1\]: has 0 characters"),
        "stop token beyond vocabulary": ({"stop": [1, 100]}, {}, r"stop\[1\]: is 100"),
        "top logprobs": ({}, {"topk_sample_logprobs": 101}, "topk_sample_logprobs: must be 0 to 100, got 101"),
        "alternatives": ({}, {"prompt_alt_tokens_k": 101}, "prompt_alt_tokens_k"),
        "last n of nothing": ({}, {"prompt_logprobs_last_n": 1}, "prompt_logprobs, which is not asked for"),
        "last n of more": ({}, {"prompt_logprobs": True, "prompt_logprobs_last_n": 3}, "must be 1 to 2 .*got 3"),
        "float targets": ({}, {"target_prompt_logprobs": TARGETS | {"dtype": "float32"}}, "must be int64"),
        "targets without columns": (
            {},
            {"target_prompt_logprobs": TARGETS | {"shape": [2]}},
            r"must be int64 \[.*\[2\]",
        ),
        "targets of another prompt": ({}, {"target_prompt_logprobs": TARGETS, "tokens": [1, 2]}, "have 1 rows.*got 2"),
        "target beyond vocabulary": ({}, {"target_prompt_logprobs": TARGETS | {"data": [1, 100]}}, "token 100"),
        "no target": ({}, {"target_prompt_logprobs": TARGETS | {"data": [-1, -1]}}, "names no token"),
        "too many targets": (
            {},
            {"target_prompt_logprobs": {"data": [1] * 202, "dtype": "int64", "shape": [2, 101]}},
            "202 cells, the limit is 100",
        ),
    }

    @pytest.mark.parametrize(
        "fields",
        [
            {"target_prompt_logprobs": TARGETS},
            {"target_prompt_logprobs": TARGETS | {"data": [-1, 99]}},
            {
                "target_prompt_logprobs": {
                    "data": [5],
                    "dtype": "int64",
                    "shape": [2, 4000],
                    "sparse_crow_indices": [0, 0, 1],
                    "sparse_col_indices": [3999],
                }
            },
            {"prompt_logprobs": True, "prompt_logprobs_last_n": 2, "topk_prompt_logprobs": 100},
            {"prompt_alt_tokens_k": 100, "topk_sample_logprobs": 100, "record_stability_info": True},
            {"tokens": [0, 99], "num_samples": 4, "return_routed_experts": True, "max_staleness": 0},
            {"params": {"top_k": 1, "temperature": 1e-6, "stop": [0, 99]}},
            {"params": {"top_k": 2**31 - 1, "temperature": 0.0, "stop": "a" * 256}},
        ],
    )
    def test_everything_that_can_be_asked(self, limits: LimitsResponse, fields: dict[str, Any]) -> None:
        check_sample(self.request(**fields), limits, MODEL)

    def test_experts_of_a_model_without_and_the_age_of_what_never_gets_old(self, limits: LimitsResponse) -> None:
        dense = limits.models[MODEL].model_copy(update={"num_experts": 0})
        limits = limits.model_copy(update={"models": {MODEL: dense}})
        check_sample(self.request(), limits, MODEL, of_run=False)
        with pytest.raises(Invalid, match="has no experts; leave it out"):
            check_sample(self.request(return_routed_experts=True), limits, MODEL)
        with pytest.raises(Invalid, match="this sampler is of no training run"):
            check_sample(self.request(max_staleness=0), limits, MODEL, of_run=False)

    @pytest.mark.parametrize("case", BAD)
    def test_bad(self, case: str, limits: LimitsResponse) -> None:
        params, fields, says = self.BAD[case]
        with pytest.raises(Invalid, match=says):
            check_sample(self.request(params, **fields), limits, MODEL)

    @pytest.mark.parametrize(
        "chunk",
        [
            {"type": "image", "data": "aaaa", "format": "png"},
            {"type": "image_asset_pointer", "format": "png", "location": "x"},
            {"type": "dmel", "dmel": "aaaa"},
        ],
    )
    def test_images_and_audio_are_refused_by_name(self, limits: LimitsResponse, chunk: dict[str, Any]) -> None:
        request = SampleRequest.model_validate({"prompt": {"chunks": [chunk]}, "sampling_params": {}})
        with pytest.raises(Invalid, match=rf"prompt.chunks.0: {chunk['type']} chunks are not supported"):
            check_sample(request, limits, MODEL)


class TestRuns:
    @pytest.mark.parametrize("rank", [1, 16])
    def test_ranks(self, rank: int) -> None:
        check_lora(LoraConfig(rank=rank), 16)

    def test_bad_ranks(self) -> None:
        with pytest.raises(Invalid, match="1 to 16, got 17"):
            check_lora(LoraConfig(rank=17), 16)

    @pytest.mark.parametrize("ttl", [None, 3600, 10 * 365 * 86_400])
    def test_lives(self, ttl: int | None) -> None:
        check_ttl(ttl)

    @pytest.mark.parametrize("ttl", [0, -1, 3599, 10**10])
    def test_bad_lives(self, ttl: int) -> None:
        with pytest.raises(Invalid, match=f"got {ttl}"):
            check_ttl(ttl)

    @pytest.mark.parametrize(("value", "says"), [(None, "required"), (0, "got 0"), (2**31, "got")])
    def test_bad_sequence_numbers(self, value: int | None, says: str) -> None:
        with pytest.raises(Invalid, match=says):
            check_sequence(value, "seq_id", least=1)

    def test_metadata(self) -> None:
        assert check_metadata(None) == {}
        assert check_metadata({"a": [1, float("nan")]}) == {"a": [1, None]}
        for bad in ({"a": "x" * 20_000}, {"a": "\0"}, {"a": 2**70}):
            with pytest.raises(Invalid, match="user_metadata"):
                check_metadata(bad)

    def test_text(self) -> None:
        assert check_text("ab", "tag", 2) == "ab"
        for bad in ("abc", "\0"):
            with pytest.raises(Invalid, match="tag"):
                check_text(bad, "tag", 2)


def test_optimizers() -> None:
    assert family_of({"type": "adamw"}, "optimizer_config") == "adamw"
    assert family_of(None, "optimizer_config") is None
    assert family_of({"type": "dimuon", "version": 1}, "optimizer_config") == "dimuon"
    with pytest.raises(Invalid, match=r"'sgd' is not supported.*adamw, dimuon"):
        family_of({"type": "sgd"}, "optimizer_config")
    with pytest.raises(Invalid, match=r"\['adamw'\] is not supported"):
        family_of({"type": ["adamw"]}, "optimizer_config")
    with pytest.raises(Malformed, match="version"):
        family_of({"type": "dimuon", "version": 2}, "optimizer_config")


@pytest.mark.parametrize(
    ("optimizer", "given", "words"),
    [
        ("adamw", {"adam_params": AdamParams(eps=0.0)}, "eps: must be at least 1e-20, .* got 0.0"),
        (
            "adamw",
            {"adam_params": AdamParams(eps=1e-46)},
            "eps: must be at least 1e-20, since squares of gradients below it are 0 in float32, got 1e-46",
        ),
        ("dimuon", {"adam_params": AdamParams()}, "optimizer is dimuon"),
        ("adamw", {"optimizer_params": {"type": "dimuon", "learning_rate": 1}}, "optimizer is adamw"),
        ("adamw", {"optimizer_params": {"type": "adamw", "learning_rate": 1}}, "under the name adam_params"),
        ("dimuon", {"optimizer_params": {"type": "sgd"}}, "'sgd' is not supported"),
        ("dimuon", {"optimizer_params": {"type": ["dimuon"]}}, "is not supported"),
        ("dimuon", {"optimizer_params": {"learning_rate": 1}}, "None is not supported"),
        ("dimuon", {"optimizer_params": {"type": "dimuon"}}, "learning_rate"),
        ("dimuon", {"optimizer_params": {"type": "dimuon", "learning_rate": 1, "damping": 2}}, "damping"),
        ("dimuon", {"optimizer_params": {"type": "dimuon", "learning_rate": 1e30}}, "must be at most 1e\\+18"),
        ("dimuon", {"optimizer_params": {"type": "dimuon", "learning_rate": "Infinity"}}, "learning_rate"),
        ("dimuon", {"optimizer_params": {"type": "dimuon", "learning_rate": 1, "beta1": 1}}, "beta1"),
        (
            "dimuon",
            {"optimizer_params": {"type": "dimuon", "learning_rate": 1, "grad_clip_norm": "NaN"}},
            "grad_clip",
        ),
    ],
)
def test_steps_of_another_optimizer_are_refused(optimizer: str, given: dict[str, Any], words: str) -> None:
    check_step(OptimStepRequest(model_id="m", adam_params=AdamParams()), "adamw")
    check_step(OptimStepRequest(model_id="m", optimizer_params={"type": "dimuon", "learning_rate": 1}), "dimuon")
    with pytest.raises((Invalid, Malformed), match=words):
        check_step(OptimStepRequest(model_id="m", **given), optimizer)


@pytest.mark.parametrize("name", ["a", "step-01_final.v2", "A" * 256, ".hidden"])
def test_names(name: str) -> None:
    assert check_name(name, "path") == name
    assert parse_path(f"tinker://s:train:0/weights/{name}", "path") == CheckpointPath("s:train:0", "weights", name)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a b", "ä", "a" * 257, "a\n", "a\0"])
def test_bad_names(name: str) -> None:
    with pytest.raises(Invalid, match="path"):
        check_name(name, "path")


@pytest.mark.parametrize(
    "path",
    [
        "",
        "s:train:0/weights/a",
        "http://s:train:0/weights/a",
        "tinker://s:train:0/weights",
        "tinker://s:train:0/weights/a/b",
        "tinker://s:train:0/weights/",
        "tinker:///weights/a",
        "tinker://s:train:0/optimizer/a",
        "tinker://../weights/..",
        "tinker://s train/weights/a",
        "TINKER://s:train:0/weights/a",
    ],
)
def test_bad_paths(path: str) -> None:
    with pytest.raises(Invalid, match="model_path"):
        parse_path(path, "model_path")


@pytest.mark.parametrize(
    ("nusd", "text"), [(0, "0.000000000"), (1, "0.000000001"), (1_234_500_000, "1.234500000"), (-5, "-0.000000005")]
)
def test_dollars_are_exact(nusd: int, text: str) -> None:
    assert usd(nusd) == text
