"""Sections of a RunConfig: model and rollout, and what all sections share. See trainer/config.py."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator


class Section(BaseModel):
    """Base of every section: unknown keys are refused and defaults are validated too."""

    model_config = ConfigDict(extra="forbid", validate_default=True, use_attribute_docstrings=True)


class TinyModel(Section):
    """Architecture of a Llama-type model that is trained from nothing (no weights are shipped)."""

    hidden_size: Annotated[int, Field(ge=8, multiple_of=8)] = 256
    """Width of the residual stream."""
    num_layers: Annotated[int, Field(ge=2)] = 2
    """Transformer layers; lookup by key needs at least two."""
    num_heads: Annotated[int, Field(ge=1)] = 4
    """Attention heads (as many key/value heads)."""
    intermediate_size: Annotated[int, Field(ge=8)] = 512
    """Width of the feed-forward layers."""
    max_position_embeddings: Annotated[int, Field(ge=64)] = 1024
    """Context window, in tokens."""

    @model_validator(mode="after")
    def _heads_divide(self) -> TinyModel:
        if self.hidden_size % self.num_heads or (self.hidden_size // self.num_heads) % 2:
            raise ValueError(
                f"hidden_size {self.hidden_size} must be an even multiple of num_heads {self.num_heads}: "
                "choose for example hidden_size=256 num_heads=4"
            )
        return self


class ModelConfig(Section):
    """The policy that is trained."""

    path: str | None = None
    """Folder of a Hugging Face checkpoint (config.json, safetensors, tokenizer); empty: build `tiny` and warm it up."""
    tiny: TinyModel = TinyModel()
    """Architecture used when `path` is empty."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of forward and backward passes, of the weights that sample, and of exports. bfloat16: the optimizer's
    weights and the gradients' sums stay in float32. float32 keeps rollout and training log-probs equal to about 1e-6.
    """
    context_window: Annotated[int, Field(ge=0)] = 0
    """Longest prompt plus response, in tokens; 0: what the checkpoint's config says."""
    gradient_checkpointing: Literal["none", "selective", "full"] = "none"
    """Recompute activations in the backward pass. full (or true): a layer's input alone is kept, least memory, about a
    third more time. selective: attention and every second matrix product are kept as well, between the two."""

    @field_validator("gradient_checkpointing", mode="before")
    @classmethod
    def _spelling(cls, value: Any) -> Any:
        # It was a switch at first, and is one in other trainers' files.
        return {True: "full", False: "none"}.get(value, value) if isinstance(value, bool) else value


class RolloutConfig(Section):
    """How trajectories are sampled."""

    batch_size: Annotated[int, Field(ge=1)] = 32
    """Tasks per training step; sft: examples per training step; trainer.type=null: tasks that are rolled out and
    written together."""
    group_size: Annotated[int, Field(ge=1)] = 8
    """Trajectories per task; their mean reward is the baseline."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """Sampling temperature. The trainer applies the same one to its log-probs. 0, greedy, is for trainer.type=null."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Must be 1 in training: a cut distribution biases every importance ratio."""
    top_k: int = -1
    """Must be -1 (off) in training, for the same reason."""
    max_batch_tokens: Annotated[int, Field(ge=64)] = 16384
    """embedded engine: most prompt tokens in one forward pass."""
    save_trajectories: bool = True
    """Write rollouts/step_N.jsonl.zst: tokens, text, rewards and weight versions of every trajectory."""
    gpu_memory_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.8
    """Engine servers: share of a GPU's memory for weights and KV cache."""
    max_running: Annotated[int, Field(ge=0)] = 0
    """Engine servers: most requests that one server works on at a time; 0: as many as the KV cache holds."""
    max_staleness: Annotated[int, Field(ge=0)] = 0
    """Engine servers: by how many weight versions a trajectory may be older than the step that learns from it (eta of
    asynchronous training, AReaL's max_head_offpolicyness). 0: synchronous, nothing is sampled while training."""
    window: Annotated[int, Field(ge=0)] = 0
    """With max_staleness: of how many of the oldest groups the finished ones are taken first, so that one slow document
    does not hold a step up; 0: three tenths of batch_size. Nothing overtakes what would then become too old."""
    refill: bool | None = None
    """Groups whose rewards are all equal (where turns are rewarded apart: those of the turns) are left out and others
    sampled in their place (DAPO's dynamic sampling). Empty: with algorithm.name=dapo."""
    max_refill: Annotated[float, Field(ge=1)] = 4.0
    """With refill: most groups sampled for one step, as a multiple of batch_size; then the step takes what there is."""
    share_prefixes: bool = True
    """Prompts of a group that begin alike: the common prefix is read once, and the prompts follow when that is done.
    Found from the token ids, whatever the agent (docs/servers.md). Changes speed alone."""
    prefetch_sections: bool = False
    """Engine servers: the next section is read while the present turn is answered, where the agent says how its next
    prompts begin (agent.prompt_order=section_first) and the server has room. Wants share_prefixes."""
    stall_seconds: Annotated[float, Field(gt=0)] = 600.0
    """Engine servers: when no response has come for so long, the log names the trajectories that are waited for."""
