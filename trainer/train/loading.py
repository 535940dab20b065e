"""From a checkpoint folder to ranks that hold parts of its model: none of them ever holds more than its own part and
one tensor more.

The model is made on the meta device, shared out there (tensor parallel layers, FSDP2), and then every rank reads the
slices that are its own. Where the files do not name tensors as the model does (transformers converts some
architectures while it loads them; other formats than safetensors), the model is loaded whole into host memory, and the
devices get their parts from there.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.conversion_mapping import get_model_conversion_mapping

from trainer.config import RunConfig
from trainer.config_parts import ModelConfig
from trainer.train.distributed import World, own_region, shard
from trainer.train.gpu_footprint import require_room
from trainer.train.logprobs import PolicyModel
from trainer.train.lora import AdaptedWeights, add_adapters
from trainer.train.model import check_weights, copy_in, empty_lm, load_lm, readable
from trainer.train.tensorparallel import split_layers
from trainer.train.weightfiles import WeightFiles, Weights, WholeWeights, has_safetensors

ROWS_AT_ONCE = 4096
Owner = tuple[nn.Module, str]
"""A module, and the name under which it has a parameter."""


class Origin:
    """The model that a run starts from, on one of its ranks.

    lm: what is to be trained, with its adapters (model.lora), whole on the rank's device where there is no mesh; else
    its parameters are on the meta device, and their values in `weights`, for `Learner` to share out and fill.

    Raises:
        UserError: the folder holds no model that can be trained here, or training it can never fit into the GPU.
        RunError: it does not fit now, beside what else uses the GPU.
    """

    def __init__(self, folder: Path, config: RunConfig, world: World) -> None:
        self.config, self.world = config, world
        self.weights: Weights | None = None
        if world.mesh is None:
            lm = self._adapted(load_lm(folder, config.model, torch.float32))
            require_room(lm, config, world)
            self.lm = lm.to(world.device)
        else:
            lm, weights = open_checkpoint(folder, config.model)
            self.lm = self._adapted(lm)
            self.weights = AdaptedWeights(weights, lm, config.seed) if config.model.lora.rank else weights
            require_room(self.lm, config, world)

    def _adapted(self, lm: Any) -> Any:
        return add_adapters(lm, self.config.model.lora, self.world.dtype, self.config.seed)

    def replica(self) -> Any:
        """The whole model for sampling, in the dtype of the passes; `lm` itself where there is no mesh."""
        return self.lm if self.weights is None else self._filled(copy_in(self.lm, self.world.dtype))

    def reference(self) -> PolicyModel:
        """The model as it is now, never to be trained, in the dtype of the passes; shared out as the trained one is."""
        policy = PolicyModel(copy_in(self.lm, self.world.dtype))
        if self.world.size > 1:
            split_layers(policy.lm, self.world)
            shard(policy, self.world)
        self._filled(policy.lm)
        return policy

    def _filled(self, lm: Any) -> Any:
        if self.weights is not None:
            fill(lm, self.weights, self.world.device)
        return lm.to(self.world.device)


def open_checkpoint(folder: Path, config: ModelConfig) -> tuple[Any, Weights]:
    """A folder's model on the meta device, and where its values are read from. Raises UserError as `load_lm`."""
    lm, files = look_at(folder)
    weights = WholeWeights(dict(load_lm(folder, config, torch.float32).state_dict())) if files is None else files
    _untie_what_differs(lm, weights)
    return lm, weights


def look_at(folder: Path) -> tuple[Any, WeightFiles | None]:
    """A folder's model on the meta device, and its files where they hold what it is made of, under its names.

    None where only transformers can tell: other names and arrangements, other formats. No weights are read.

    Raises:
        UserError: as `load_lm`, for what names and shapes tell.
    """
    lm = empty_lm(folder)
    if not has_safetensors(folder) or get_model_conversion_mapping(lm, add_legacy=False):
        return lm, None
    with readable(folder):
        files = WeightFiles(folder)
    stored = {name: tensor for name, tensor in lm.state_dict(keep_vars=True).items() if tensor.is_meta}
    missing = [names[0] for names in _names(stored) if files.shapes.keys().isdisjoint(names)]
    if missing and not files.shapes.keys() <= stored.keys():
        return lm, None
    shapes = ((name, files.shapes.get(name), tuple(tensor.shape)) for name, tensor in stored.items())
    check_weights(folder, missing, (entry for entry in shapes if entry[1] not in (None, entry[2])))
    return lm, files


@torch.no_grad()
def fill(lm: Any, weights: Weights, device: torch.device) -> None:
    """Give every parameter that is on the meta device, sharded or not, its place on `device` and its values.

    Every rank reads its own part; nothing is sent between them. Tied weights stay one.
    """
    owners: dict[int, list[Owner]] = defaultdict(list)
    names: dict[int, str] = {}
    tensors: dict[int, Tensor] = {}
    for path, module in lm.named_modules():
        for leaf, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and tensor.is_meta:
                name = f"{path}.{leaf}" if path else leaf
                if name in weights.shapes:
                    names.setdefault(id(tensor), name)
                owners[id(tensor)].append((module, leaf))
                tensors[id(tensor)] = tensor
    try:
        for key in sorted(tensors, key=lambda key: weights.place(names[key])):
            value = _made(tensors[key], weights, names[key], device)
            for module, leaf in owners[key]:
                module.load_state_dict({leaf: value}, strict=False, assign=True)
    finally:
        weights.close()


def _made(empty: Tensor, weights: Weights, name: str, device: torch.device) -> Tensor:
    """A tensor as the empty one, with this rank's values."""
    region = own_region(empty)
    own = torch.empty([part.stop - part.start for part in region], dtype=empty.dtype, device=device)
    if own.numel():
        own.copy_(weights.read(name, region).to(device))
    made: Tensor = own
    if isinstance(empty, DTensor):
        made = DTensor.from_local(
            own, empty.device_mesh, empty.placements, run_check=False, shape=empty.shape, stride=empty.stride()
        )
    return nn.Parameter(made, requires_grad=empty.requires_grad) if isinstance(empty, nn.Parameter) else made


def _names(stored: dict[str, Tensor]) -> list[list[str]]:
    """The names of every tensor; several where weights are tied."""
    found: dict[int, list[str]] = defaultdict(list)
    for name, tensor in stored.items():
        found[id(tensor)].append(name)
    return list(found.values())


def _untie_what_differs(lm: Any, weights: Weights) -> None:
    """Take weights for two where config.json says that they are tied and the files hold both, with different values;
    transformers does the same.
    """
    tied: dict[str, str] = getattr(lm, "all_tied_weights_keys", None) or {}
    for name, source in list(tied.items()):
        if name in weights.shapes and source in weights.shapes and not _equal(weights, name, source):
            owner, _, leaf = name.rpartition(".")
            module = lm.get_submodule(owner)
            setattr(module, leaf, nn.Parameter(torch.empty_like(getattr(module, leaf))))
            tied.pop(name)
    weights.close()


def _equal(weights: Weights, one: str, other: str) -> bool:
    shape = weights.shapes[one]
    if shape != weights.shapes[other]:
        return False
    rest = [slice(0, count) for count in shape[1:]]
    for start in range(0, shape[0], ROWS_AT_ONCE):
        region = [slice(start, min(start + ROWS_AT_ONCE, shape[0])), *rest]
        if not torch.equal(weights.read(one, region), weights.read(other, region)):
            return False
    return True
