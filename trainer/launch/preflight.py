"""What can be found wrong with a run's model before a GPU, a rank or a server is touched."""

from __future__ import annotations

from pathlib import Path

from trainer.config import RunConfig
from trainer.engines.launching import check_options
from trainer.engines.options import check_model, check_window
from trainer.paths import RunPaths
from trainer.placement import Place, gpus_per_server, local_places
from trainer.serving import registry
from trainer.serving.host import server_options
from trainer.train.loading import look_at
from trainer.train.tensorparallel import check_split, tensor_degree


def check_run(config: RunConfig, model: Path) -> None:
    """See that a model folder can be trained and served as the run wants it; files are read, no weights.

    Raises:
        UserError: it is of another architecture, lacks weights or has ones of another shape, its heads cannot be shared
            out over the GPUs, or a server of the kind is not installed here, where it is to run here.

    """
    if config.trainer.type != "null":
        lm, _ = look_at(model)
        check_split(lm.config, tensor_degree(config))
    if config.engine == "embedded":
        return
    logs = registry.folder_of(RunPaths.of(config).logs)
    here = config.mode != "ray"
    # On a cluster the nodes have GPUs and programs of their own; the model is the same.
    places = local_places(config) if here else [Place("a server", tuple(range(gpus_per_server(config))))]
    for place in places:
        options = server_options(config, model, logs / f"{place.name}.log", place.name, place.gpus, "127.0.0.1")
        if here:
            check_options(config.engine, options)
        else:
            check_model(options)
            check_window(config.engine, options)
