"""Bodies of training: making a run, passes and optimizer steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import Field, model_validator

from weft.wire.base import Count, Finite, Positive, Request, Response, Seed, TrainSeq
from weft.wire.inputs import Datum
from weft.wire.tensor import TensorData

__all__ = [
    "AdamOptimizerConfig",
    "AdamParams",
    "CreateModelRequest",
    "CreateModelResponse",
    "DimuonOptimizerConfig",
    "DimuonParams",
    "ForwardBackwardInput",
    "ForwardBackwardOutput",
    "ForwardBackwardRequest",
    "GetInfoRequest",
    "GetInfoResponse",
    "LoraConfig",
    "LossFnOutput",
    "LossFnType",
    "ModelData",
    "ModelID",
    "OptimParams",
    "OptimStepRequest",
    "OptimStepResponse",
    "OptimizerConfig",
]

ModelID = str
LossFnType = Literal[
    "cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo", "stable_reinforce", "custom"
]


class LoraConfig(Request):
    """Shape of a run's adapter: its rank, the seed of its start, and which parts of each layer it adapts."""

    rank: Positive
    seed: Seed | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True

    @model_validator(mode="after")
    def _trains_something(self) -> LoraConfig:
        if not (self.train_unembed or self.train_mlp or self.train_attn):
            raise ValueError("at least one of train_unembed, train_mlp and train_attn must be true")
        return self


class AdamOptimizerConfig(Request):
    """The optimizer of a run: AdamW. Other types are parsed as plain dicts, and the server refuses them."""

    type: Literal["adamw"] = "adamw"


class DimuonOptimizerConfig(Request):
    """The optimizer of a run: DiMuon, momentum whose updates are orthogonalised."""

    type: Literal["dimuon"] = "dimuon"
    version: Literal[1] = 1


OptimizerConfig = AdamOptimizerConfig | DimuonOptimizerConfig | dict[str, Any]


class AdamParams(Request):
    """One AdamW step: decoupled weight decay, and clipping by the global norm of the run's gradient (0 = off)."""

    learning_rate: Finite = Field(default=1e-4, ge=0)
    beta1: Finite = Field(default=0.9, ge=0, lt=1)
    beta2: Finite = Field(default=0.95, ge=0, lt=1)
    eps: Finite = Field(default=1e-12, ge=0)
    weight_decay: Finite = Field(default=0.0, ge=0)
    grad_clip_norm: Finite = Field(default=0.0, ge=0)


class DimuonParams(Request):
    """One DiMuon step. A `grad_clip_norm` that is not positive turns clipping off."""

    type: Literal["dimuon"] = "dimuon"
    learning_rate: Finite = Field(ge=0)
    grad_clip_norm: Finite = 0.0
    beta1: Finite = Field(default=0.9, ge=0, lt=1)


OptimParams = AdamParams | DimuonParams


class CreateModelRequest(Request):
    session_id: str
    model_seq_id: Count
    base_model: str
    lora_config: LoraConfig | None = None
    user_metadata: dict[str, Any] | None = None
    optimizer_config: OptimizerConfig = AdamOptimizerConfig()
    type: Literal["create_model"] = "create_model"


class CreateModelResponse(Response):
    model_id: ModelID
    type: Literal["create_model"] = "create_model"


class GetInfoRequest(Request):
    model_id: ModelID
    type: Literal["get_info"] = "get_info"


class ModelData(Response):
    """The base model of a run: its architecture, served name and tokenizer."""

    arch: str | None = None
    model_name: str | None = None
    tokenizer_id: str | None = None


class GetInfoResponse(Response):
    type: Literal["get_info"] | None = None
    model_data: ModelData
    model_id: ModelID
    optimizer_config: OptimizerConfig = AdamOptimizerConfig()
    is_lora: bool | None = None
    lora_rank: int | None = None
    model_name: str | None = None


class OptimStepRequest(Request):
    """Apply the accumulated gradient. `adam_params` or, for other optimizers, `optimizer_params`; exactly one.

    `heard_of`: the caller knew of every failure up to this number when it sent another forward_backward; a step after a
    later failure is not taken. Tinker's own client does not send it.
    """

    model_id: ModelID
    adam_params: AdamParams | None = None
    optimizer_params: dict[str, Any] | None = None
    seq_id: TrainSeq | None = None
    heard_of: Count | None = None
    type: Literal["optim_step"] = "optim_step"

    @model_validator(mode="after")
    def _one_kind(self) -> OptimStepRequest:
        if (self.adam_params is None) == (self.optimizer_params is None):
            raise ValueError("give exactly one of adam_params and optimizer_params")
        return self


class OptimStepResponse(Response):
    metrics: dict[str, float] | None = None


@dataclass(frozen=True)
class ForwardBackwardInput:
    """Data, the loss over them, and the loss's options."""

    data: list[Datum]
    loss_fn: str
    loss_fn_config: dict[str, float | str] | None = None


@dataclass(frozen=True)
class ForwardBackwardRequest:
    """A forward or forward_backward operation as it is sent; protobuf on the wire."""

    forward_backward_input: ForwardBackwardInput
    model_id: ModelID
    seq_id: int
    forward_only: bool = False


LossFnOutput = dict[str, TensorData]


@dataclass(frozen=True)
class ForwardBackwardOutput:
    """Per datum what its loss computed (`logprobs`, shaped as its target tokens), and metrics as `name:reduction`."""

    loss_fn_output_type: str
    loss_fn_outputs: list[LossFnOutput]
    metrics: dict[str, float] = field(default_factory=dict)
