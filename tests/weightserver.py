"""A stand-in for an inference server: a process of its own that takes weights over SGLang's routes.

It is a fake of SGLang's outside (routes and fields as read in 0.5.17), with real parts within: it joins a real gloo
group, receives real broadcasts, loads real safetensors files and unpickles real payloads. That SGLang itself takes the
same is shown by tests/gpu/test_weights.py. It also misbehaves on demand, which SGLang cannot be asked to.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import pickle
import threading
from dataclasses import dataclass
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed import distributed_c10d as c10d


@dataclass(frozen=True)
class Faults:
    """What goes wrong. die_at, refuse_at, hang_at: number of the bucket, from 0. hang_join: it never joins a group.
    memory_saver: whether it was started so that it can give its memory away. tensor_parallel: GPUs that it has.
    """

    die_at: int = -1
    refuse_at: int = -1
    hang_at: int = -1
    hang_join: bool = False
    memory_saver: bool = True
    tensor_parallel: int = 1


class Weights:
    """What the server holds, and how it takes new ones."""

    def __init__(self, model: Path, faults: Faults) -> None:
        self.given = faults
        self.version = "0"
        self.tensors: dict[str, torch.Tensor] = {}
        self.groups: dict[str, Any] = {}
        self.released: list[str] = []
        self.buckets = 0
        self.seen: list[str] = []
        self.scheduler = threading.Lock()  # one thing at a time, as in SGLang
        self.load(model)

    def load(self, folder: Path) -> None:
        for file in sorted(folder.glob("*.safetensors")):
            self.tensors.update(load_file(file))

    def digest(self) -> str:
        total = hashlib.sha256()
        for name, tensor in sorted(self.tensors.items()):
            total.update(name.encode() + str(tensor.dtype).encode())
            total.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        return total.hexdigest()

    def join(self, body: dict[str, Any]) -> None:
        if self.given.hang_join:
            threading.Event().wait()
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        address = f"tcp://{body['master_address']}:{body['master_port']}"
        store, _, _ = next(dist.rendezvous(address, body["rank_offset"], body["world_size"]))
        name = body["group_name"]
        self.groups[name], _ = c10d._new_process_group_helper(
            body["world_size"],
            body["rank_offset"],
            [],
            c10d.Backend(body["backend"]),
            dist.PrefixStore(name, store),
            group_name=name,
            timeout=timedelta(seconds=30),
        )

    def receive(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        number, self.buckets = self.buckets, self.buckets + 1
        if number == self.given.die_at:
            os._exit(9)
        if number == self.given.hang_at:
            threading.Event().wait()
        if number == self.given.refuse_at:
            return 400, {"success": False, "message": "Failed to update parameter online: as it was told to."}
        assert body["load_format"] == "flattened_bucket"
        dtypes = [getattr(torch, name) for name in body["dtypes"]]
        empty = [torch.empty(shape, dtype=dtype) for shape, dtype in zip(body["shapes"], dtypes, strict=True)]
        flat = torch.cat([tensor.flatten().view(torch.uint8) for tensor in empty])
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self.groups[body["group_name"]].broadcast([flat], options).wait()
        self.take(flat, list(zip(body["names"], dtypes, body["shapes"], strict=True)))
        return 200, {"success": True}

    def take(self, flat: torch.Tensor, tensors: list[tuple[str, torch.dtype, Any]]) -> None:
        start = 0
        for name, dtype, shape in tensors:
            end = start + torch.Size(shape).numel() * dtype.itemsize
            self.tensors[name] = flat[start:end].view(dtype).reshape(shape).clone()
            start = end
        assert start == len(flat)

    def answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/model_info":
            return 200, {"weight_version": self.version}
        if path == "/server_info":
            return 200, {
                "version": "0.5.17",
                "tp_size": self.given.tensor_parallel,
                "enable_memory_saver": self.given.memory_saver,
            }
        if path == "/state":  # of this stand-in only
            return 200, {"digest": self.digest(), "groups": len(self.groups), "calls": self.seen}
        self.seen.append(path)
        if path == "/generate":
            meta = {"output_token_logprobs": [[-0.5, 7, None]], "finish_reason": {"type": "length"}}
            return 200, {"meta_info": {**meta, "weight_version": self.version, "prompt_tokens": 1}}
        if path not in ROUTES:
            return 200, {}
        with self.scheduler:
            status, answer = getattr(self, ROUTES[path])(body)
        if status == 200 and body.get("weight_version") is not None:
            self.version = body["weight_version"]
        return status, answer

    def init_group(self, body: dict[str, Any]) -> tuple[int, Any]:
        self.join(body)
        return 200, {"success": True}

    def destroy_group(self, body: dict[str, Any]) -> tuple[int, Any]:
        return (200 if self.groups.pop(body["group_name"], None) else 400), {}

    def from_disk(self, body: dict[str, Any]) -> tuple[int, Any]:
        self.load(Path(body["model_path"]))
        return 200, {"success": True}

    def from_tensor(self, body: dict[str, Any]) -> tuple[int, Any]:
        assert body["load_format"] == "flattened_bucket"
        assert "weights" not in self.released
        number, self.buckets = self.buckets, self.buckets + 1
        if number == self.given.die_at:
            os._exit(9)
        payloads = body["serialized_named_tensors"]
        assert len(payloads) == self.given.tensor_parallel
        found = [pickle.loads(base64.b64decode(payload, validate=True)) for payload in payloads]
        for one in found:  # each of the server's GPUs has its own rank to read from
            assert torch.equal(one["flattened_tensor"], found[0]["flattened_tensor"])
        for meta in found[0]["metadata"]:
            assert meta.end_idx - meta.start_idx == meta.numel
            part = found[0]["flattened_tensor"][meta.start_idx : meta.end_idx]
            self.take(part, [(meta.name, meta.dtype, meta.shape)])
        return 200, {"success": True}

    def release(self, body: dict[str, Any]) -> tuple[int, Any]:
        self.released += body["tags"]
        if "weights" in body["tags"]:
            self.tensors = {name: torch.zeros_like(tensor) for name, tensor in self.tensors.items()}
        return 200, {}

    def resume(self, body: dict[str, Any]) -> tuple[int, Any]:
        for tag in body["tags"]:
            self.released.remove(tag)
        return 200, {}


ROUTES = {
    "/init_weights_update_group": "init_group",
    "/destroy_weights_update_group": "destroy_group",
    "/update_weights_from_distributed": "receive",
    "/update_weights_from_disk": "from_disk",
    "/update_weights_from_tensor": "from_tensor",
    "/release_memory_occupation": "release",
    "/resume_memory_occupation": "resume",
}


def listen(weights: Weights, host: str = "127.0.0.1", port: int = 0) -> ThreadingHTTPServer:
    """A server of these weights, not serving yet. port: 0 takes a free one."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def handle_any(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
            try:
                status, content = weights.answer(self.command, self.path.partition("?")[0], body)
            except Exception as error:
                status, content = 500, {"error": repr(error)}
            payload = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        do_GET = do_POST = handle_any  # noqa: N815 (what http.server calls)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    class Many(ThreadingHTTPServer):
        request_queue_size = 256  # all requests of a step connect at once

    return Many((host, port), Handler)


def serve(model: Path, faults: Faults, port: Connection) -> None:
    """Entry point of a server's process; sends its port once it answers."""
    torch.set_num_threads(1)
    server = listen(Weights(model, faults))
    port.send(server.server_address[1])
    server.serve_forever()
