"""A small Tinker service of our own, on loopback: the real client library talks to it.

It speaks the library's HTTP protocol as far as trinity uses it (JSON requests, protocol buffers for
passes and samples, results fetched later), and computes on a tiny model with PEFT's LoRA, plain
`torch.optim.AdamW` and a plain loop that samples. It shares no code with trinity's engines.
"""

import asyncio
import copy
import json
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import uvicorn
import zstandard
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from peft import LoraConfig, inject_adapter_in_model
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import save as to_bytes
from tinker.proto import tinker_public_pb2 as wire
from torch import Tensor

KEY = "tml-test"
ALPHA = 32
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
API = "/api/v1"


@dataclass
class Saved:
    """What a path of the service stands for."""

    base_model: str
    config: dict[str, Any] | None
    weights: dict[str, Tensor]
    optimizer: dict[str, Any] | None = None


@dataclass
class Trained:
    """A training run: a model with an adapter, and its optimizer."""

    base_model: str
    config: dict[str, Any]
    model: Any
    optimizer: torch.optim.AdamW


@dataclass
class TinkerTestService:
    """The service. ``serving`` runs it; tests look at what it holds, and can make it fail.

    Args:
        models: Name -> makes a float32 model of transformers.
        end_ids: Ids that end a sample unless a request names its own ends.
        decode: Ids -> text, for ends that are texts.
    """

    models: dict[str, Callable[[], Any]]
    end_ids: tuple[int, ...] = ()
    decode: Callable[[list[int]], str] = lambda ids: ""
    max_context_length: int = 1024
    trained: dict[str, Trained] = field(default_factory=dict)
    saved: dict[str, Saved] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    samplers: dict[str, Saved] = field(default_factory=dict)
    exported: dict[str, str] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    status: int | None = None
    hangs: bool = False
    address: str = ""

    def __post_init__(self) -> None:
        self._bases: dict[str, Any] = {}
        self._jobs: dict[str, Future[Any]] = {}
        self._cancelled: set[str] = set()
        self._worker = ThreadPoolExecutor(1)
        self.num_sampling = 0

    # Models

    def _sampling_model(self, saved: Saved) -> Any:
        """One model for each kind of adapter, which takes up the weights it is asked for."""
        kind = f"{saved.base_model} {saved.config}"
        if kind not in self._bases:
            model = self.models[saved.base_model]()
            self._bases[kind] = _with_adapter(model, saved.config) if saved.config else model
        if saved.config:
            set_peft_model_state_dict(self._bases[kind], saved.weights)
        return self._bases[kind].eval()

    def keep(self, weights: dict[str, Tensor], base_model: str, name: str) -> str:
        """Weights of the whole model under a path, for tests of engines."""
        path = f"tinker://test/sampler_weights/{name}"
        model = self.models[base_model]()
        model.load_state_dict(weights, strict=False)
        self.models[path] = lambda: model
        self.saved[path] = Saved(path, None, {})
        return path

    def create(self, body: dict[str, Any]) -> dict[str, Any]:
        model_id = f"{body['session_id']}:train:{body['model_seq_id']}"
        config, base = body["lora_config"], body["base_model"]
        self.trained[model_id] = self._new(base, config)
        return {"model_id": model_id, "type": "create_model"}

    def _new(self, base: str, config: dict[str, Any]) -> Trained:
        model = _with_adapter(self.models[base](), config)
        parameters = [p for p in model.parameters() if p.requires_grad]
        return Trained(base, config, model, torch.optim.AdamW(parameters))

    def passes(self, request: Any) -> bytes:
        """Logprobs of targets, and unless ``forward_only`` the gradient of their weighted sum."""
        run = self.trained[request.model_id]
        losses, found = [], []
        with torch.set_grad_enabled(not request.forward_only):
            for datum in request.data:
                ids = _tokens(datum.model_input)
                targets = _tensor(datum.loss_fn_inputs["target_tokens"])
                logits = run.model(torch.tensor([ids])).logits[0].float()
                logprobs = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
                losses.append(-(logprobs * _tensor(datum.loss_fn_inputs["weights"])).sum())
                found.append(logprobs.detach())
            if not request.forward_only:
                sum(losses).backward()
        return _passes_answer(found, float(sum(losses).detach()))

    def step(self, body: dict[str, Any]) -> dict[str, Any]:
        run, given = self.trained[body["model_id"]], body["adam_params"]
        [group] = run.optimizer.param_groups
        group |= {
            "lr": given["learning_rate"],
            "betas": (given["beta1"], given["beta2"]),
            "eps": given["eps"],
            "weight_decay": given["weight_decay"],
        }
        largest = given["grad_clip_norm"] or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(group["params"], largest)
        run.optimizer.step()
        run.optimizer.zero_grad()
        return {"metrics": {"grad_norm": float(norm)}}

    def save(self, body: dict[str, Any]) -> dict[str, Any]:
        run = self.trained[body["model_id"]]
        path = f"tinker://{body['model_id']}/weights/{body['path']}"
        if path in self.saved and not body["overwrite"]:
            raise ValueError(f"{path} exists")
        self.saved[path] = _snapshot(run, copy.deepcopy(run.optimizer.state_dict()))
        return {"path": path, "type": "save_weights"}

    def save_for_sampler(self, body: dict[str, Any]) -> dict[str, Any]:
        path = f"tinker://{body['model_id']}/sampler_weights/{body['path']}"
        if path in self.saved:
            raise ValueError(f"{path} exists")
        self.saved[path] = _snapshot(self.trained[body["model_id"]], None)
        return {"path": path, "type": "save_weights_for_sampler"}

    def export(self, body: dict[str, Any]) -> dict[str, Any]:
        """PEFT's files of the adapter, to be fetched."""
        run, folder = self.trained[body["model_id"]], f"{len(self.files)}"
        config = {"r": run.config["rank"], "lora_alpha": ALPHA, "peft_type": "LORA"}
        weights = {f"base_model.model.{n}": t for n, t in _adapter(run.model).items()}
        self.files[f"{folder}/adapter_config.json"] = json.dumps(config).encode()
        self.files[f"{folder}/adapter_model.safetensors"] = to_bytes(weights)
        path = f"tinker://{body['model_id']}/external_weights/{body['path']}"
        self.exported[path] = folder
        return {"path": path, "type": "save_weights_external"}

    def urls_of(self, path: str) -> dict[str, Any]:
        folder = self.exported[path]
        names = [name for name in self.files if name.startswith(f"{folder}/")]
        urls = {name.partition("/")[2]: f"{self.address}/files/{name}" for name in names}
        return {"urls": urls, "expires": "2100-01-01T00:00:00Z"}

    def load(self, body: dict[str, Any]) -> dict[str, Any]:
        saved = self.saved[body["path"]]
        run = self._new(saved.base_model, saved.config or {})
        set_peft_model_state_dict(run.model, saved.weights)
        if body["optimizer"]:
            run.optimizer.load_state_dict(copy.deepcopy(saved.optimizer))
        self.trained[f"{body['session_id']}:train:{body['model_seq_id']}"] = run
        return {"path": body["path"], "type": "load_weights"}

    # Sampling

    @torch.no_grad()
    def sample(self, request_id: str, body: dict[str, Any]) -> bytes:
        model = self._sampling_model(self.samplers[body["sampling_session_id"]])
        ids = [token for chunk in body["prompt"]["chunks"] for token in chunk["tokens"]]
        answer = wire.SampleResponse()
        if body.get("prompt_logprobs"):
            answer.prompt_logprobs = _prompt_logprobs(model, ids, body)
        params = body["sampling_params"]
        seeds = [hash((params.get("seed"), i)) % 2**31 for i in range(body["num_samples"])]
        for seed in seeds:
            tokens, logprobs, is_stopped = self._draw(model, ids, params, seed, request_id)
            sequence = answer.sequences.add()
            reason = wire.STOP_REASON_STOP if is_stopped else wire.STOP_REASON_LENGTH
            sequence.stop_reason = reason
            sequence.tokens = np.asarray(tokens, dtype=np.int32).tobytes()
            sequence.logprobs = np.asarray(logprobs, dtype=np.float32).tobytes()
        return answer.SerializeToString()

    def _draw(
        self, model: Any, ids: list[int], params: dict[str, Any], seed: int, request_id: str
    ) -> tuple[list[int], list[float], bool]:
        generator = torch.Generator().manual_seed(seed)
        most = params.get("max_tokens") or self.max_context_length - len(ids)
        stop = params.get("stop")
        ends = set(self.end_ids) if stop is None else {s for s in stop if isinstance(s, int)}
        texts = [s for s in stop or () if isinstance(s, str)]
        tokens: list[int] = []
        logprobs: list[float] = []
        new, cache = torch.tensor([ids]), None
        while len(tokens) < most and request_id not in self._cancelled:
            out = model(new, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            logits = out.logits[0, -1].float()
            token = _choice(logits, params, generator)
            tokens.append(token)
            logprobs.append(float(logits.log_softmax(-1)[token]))  # at temperature 1, as there
            if token in ends or any(text in self.decode(tokens) for text in texts):
                return tokens, logprobs, True
            new = torch.tensor([[token]])
        return tokens, logprobs, False

    # Protocol

    def start_job(self, call: Callable[[str], Any]) -> dict[str, Any]:
        request_id = uuid.uuid4().hex
        self._jobs[request_id] = self._worker.submit(call, request_id)
        return {"request_id": request_id}

    async def result_of(self, request_id: str) -> Response:
        job = self._jobs[request_id]
        deadline = time.monotonic() + 5
        while not job.done():
            if time.monotonic() > deadline:
                answer = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
                return JSONResponse(answer)
            await asyncio.sleep(0.002)
        del self._jobs[request_id]
        if error := job.exception():
            return JSONResponse({"error": f"{error}", "category": "user"})
        found = job.result()
        if isinstance(found, bytes):
            return Response(found, media_type="application/x-protobuf")
        return JSONResponse(found)

    def cancel(self, request_id: str) -> None:
        self._cancelled.add(request_id)

    def open_sampler(self, body: dict[str, Any]) -> dict[str, Any]:
        path = body.get("model_path")
        saved = self.saved[path] if path else Saved(body["base_model"], None, {})
        session_id = f"{body['session_id']}:sample:{body['sampling_session_seq_id']}"
        self.samplers[session_id] = saved
        return {"sampling_session_id": session_id}

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Answer no request for a model, only whether all is well."""
        is_over = threading.Event()
        self._worker.submit(is_over.wait)
        try:
            yield
        finally:
            is_over.set()

    @contextmanager
    def serving(self) -> Iterator["TinkerTestService"]:
        """Answer on a free port of loopback."""
        place = socket.socket()
        place.bind(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{place.getsockname()[1]}"
        config = uvicorn.Config(_app(self), log_level="critical", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [place]}, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield self
        finally:
            server.should_exit = True
            thread.join(5)
            self._worker.shutdown(wait=False, cancel_futures=True)


def _app(service: TinkerTestService) -> FastAPI:
    app = FastAPI()

    @app.middleware("http")
    async def gate(request: Request, go_on: Callable[..., Any]) -> Response:
        service.requests.append(request.url.path.removeprefix(f"{API}/"))
        if service.hangs:
            await asyncio.sleep(3600)
        if service.status is not None:
            return JSONResponse({"detail": "out of order"}, service.status)
        is_open = request.url.path.startswith((f"{API}/healthz", "/files/"))
        if not is_open and request.headers.get("X-API-Key") != KEY:
            return JSONResponse({"detail": "Invalid API key"}, 401)
        return await go_on(request)

    def post(path: str, answer: Callable[[dict[str, Any]], Any]) -> None:
        async def handle(request: Request) -> Response:
            body = await request.json()
            try:
                return JSONResponse(answer(body))
            except KeyError as error:
                return JSONResponse({"detail": f"There is no {error}"}, 404)

        app.add_api_route(f"{API}/{path}", handle, methods=["POST"])

    def later(path: str, call: Callable[[dict[str, Any]], Any]) -> None:
        post(path, lambda body: service.start_job(lambda request_id: call(body)))

    @app.get(f"{API}/healthz")
    def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get(f"{API}/get_server_capabilities")
    def capabilities() -> dict[str, Any]:
        length = service.max_context_length
        named = [name for name in service.models if not name.startswith("tinker:")]
        models = [{"model_name": name, "max_context_length": length} for name in named]
        return {"supported_models": models}

    @app.get("/files/{name:path}")
    def file(name: str) -> Response:
        return Response(service.files[name])

    @app.get(f"{API}/training_runs/{{run_id}}/checkpoints/{{name:path}}/external_weights_urls")
    def urls(run_id: str, name: str) -> dict[str, Any]:
        return service.urls_of(f"tinker://{run_id}/{name}")

    @app.get(f"{API}/samplers/{{sampler_id}}")
    def sampler(sampler_id: str) -> dict[str, str]:
        base = service.samplers[sampler_id].base_model
        return {"sampler_id": sampler_id, "base_model": base}

    @app.post(f"{API}/sessions/{{session_id}}/finish")
    def finish(session_id: str) -> None:
        return None

    @app.post(f"{API}/forward_backward")
    async def passes(request: Request) -> dict[str, Any]:
        content = await request.body()
        if request.headers.get("content-encoding") == "zstd":
            content = zstandard.decompress(content)
        message = wire.ForwardBackwardRequest()
        message.ParseFromString(content)
        return service.start_job(lambda request_id: service.passes(message))

    @app.post(f"{API}/asample")
    async def asample(request: Request) -> dict[str, Any]:
        body = await request.json()
        ids = [uuid.uuid4().hex for _ in range(body["num_samples"])]
        job = service.start_job(lambda request_id: service.sample(request_id, body))
        return {**job, "sample_sequence_ids": ids}

    @app.post(f"{API}/retrieve_future")
    async def retrieve(request: Request) -> Response:
        return await service.result_of((await request.json())["request_id"])

    post("client/config", lambda body: {"proto_compress_fwdbwd": True})
    post("client/dynamic_config", lambda body: {"sample_cancel_enabled": True})
    post("create_session", lambda body: {"session_id": uuid.uuid4().hex})
    post("session_heartbeat", lambda body: {"type": "session_heartbeat"})
    post("telemetry", lambda body: {"status": "accepted"})
    post("cancel_future", lambda body: service.cancel(body["request_id"]))
    post("create_sampling_session", service.open_sampler)
    post("get_info", lambda body: _info(service.trained[body["model_id"]], body["model_id"]))
    later("create_model", service.create)
    later("load_weights", service.load)
    later("optim_step", service.step)
    later("save_weights", service.save)
    later("save_weights_for_sampler", service.save_for_sampler)
    later("save_weights_external", service.export)
    return app


def _with_adapter(model: Any, config: dict[str, Any]) -> Any:
    targets = ATTENTION * config["train_attn"] + MLP * config["train_mlp"]
    targets += ["lm_head"] * config["train_unembed"]
    lora = LoraConfig(
        task_type="CAUSAL_LM", r=config["rank"], lora_alpha=ALPHA, target_modules=targets
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.get("seed") or 0)
        inject_adapter_in_model(lora, model, adapter_name="default")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name)
    return model


def _snapshot(run: Trained, optimizer: dict[str, Any] | None) -> Saved:
    weights = {n: t.clone() for n, t in _adapter(run.model).items()}
    return Saved(run.base_model, run.config, weights, optimizer)


def _adapter(model: Any) -> dict[str, Tensor]:
    return get_peft_model_state_dict(model)


def _info(run: Trained, model_id: str) -> dict[str, Any]:
    data = {"model_name": run.base_model}
    return {"model_data": data, "model_id": model_id, "is_lora": True}


def _tokens(chunks: Any) -> list[int]:
    parts = [np.frombuffer(chunk.encoded_text.tokens, dtype=np.int32) for chunk in chunks]
    return [int(token) for part in parts for token in part]


def _tensor(message: Any) -> Tensor:
    dtype = np.float32 if message.dtype == wire.DTYPE_FLOAT32 else np.int64
    return torch.from_numpy(np.frombuffer(message.dense, dtype=dtype).copy())


def _passes_answer(found: list[Tensor], loss: float) -> bytes:
    answer = wire.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    record = answer.loss_fn_outputs.add()
    record.num_datums = len(found)
    batched = record.fields["logprobs"]
    batched.dtype = wire.DTYPE_FLOAT32
    batched.data = b"".join(values.numpy().astype(np.float32).tobytes() for values in found)
    batched.offsets = np.cumsum([0, *(4 * len(v) for v in found)]).astype(np.int64).tobytes()
    answer.metrics["loss:sum"] = loss
    return answer.SerializeToString()


def _prompt_logprobs(model: Any, ids: list[int], body: dict[str, Any]) -> bytes:
    logits = model(torch.tensor([ids])).logits[0, :-1].float()
    values = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    last = body.get("prompt_logprobs_last_n") or len(values)
    nan = float("nan")
    shown = [nan, *(v if k >= len(values) - last else nan for k, v in enumerate(values))]
    return np.asarray(shown, dtype=np.float32).tobytes()


def _choice(logits: Tensor, params: dict[str, Any], generator: torch.Generator) -> int:
    if params["temperature"] == 0:
        return int(logits.argmax())
    probs, order = (logits / params["temperature"]).softmax(-1).sort(descending=True)
    if params["top_k"] > 0:
        probs[params["top_k"] :] = 0
    probs[(probs.cumsum(0) - probs) >= params["top_p"]] = 0
    return int(order[torch.multinomial(probs, 1, generator=generator)])
