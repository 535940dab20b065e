"""What runs inside vLLM's workers: new weights from a folder, in every place that the model computes with.

vLLM puts this class under its worker (`--worker-extension-cls`). The folder of this file is on the server's PYTHONPATH
and holds nothing else: vLLM lives in an environment of its own, and nothing of the trainer's may get in its way.
"""

from __future__ import annotations

from typing import Any


class ClusterkitWeights:
    """A worker's further methods, called over /collective_rpc."""

    def clusterkit_load(self, folder: str) -> int:
        """Load the weights in a Hugging Face folder. Returns the number of parameter values that this worker holds.

        vLLM 0.32 loads in place, but on a CPU its matrix products use copies of the weights that were packed in
        advance, and it leaves out the copy of an output layer that shares the embedding's weights: it would go on with
        the old one. So those are packed anew.
        """
        worker: Any = self
        worker.reload_weights(weights_path=folder)
        model = worker.get_model()
        for layer in model.modules():
            packed = hasattr(layer, "cpu_linear") and getattr(layer, "quant_method", None) is not None
            if packed and layer.weight.numel():  # where only the packed copy was kept, loading has packed it
                layer.quant_method.process_weights_after_loading(layer)
        return sum(parameter.numel() for parameter in model.parameters())
