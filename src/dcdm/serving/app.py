"""The application: its routes, errors in one form, and the playground's files."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from dcdm.data.tokenizers import Tokenizer
from dcdm.model.transformer import Model
from dcdm.serving import answers
from dcdm.serving.monitoring import Metrics
from dcdm.serving.scheduler import Models, QueuedRequest
from dcdm.serving.schemas import (
    APIError,
    ChatRequest,
    CompletionRequest,
    DenoiseRequest,
    Json,
    OpenAIRequest,
    invalid_body,
)
from dcdm.serving.served import ServedModel
from dcdm.serving.server import Gate
from dcdm.serving.settings import Settings, check_names
from dcdm.viewing.pages import asset as report_asset
from dcdm.viewing.pages import palette_style

T = TypeVar("T")
ASSETS = files("dcdm.serving") / "assets"
INDEX = "index.html"
SHARED = ("base.css", "dom.js", "tokens.css", "tokens.js", "player.css", "player.js")
"""Files of `viewing/assets` that reports and the playground have in common."""
TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}


class EventStream(StreamingResponse):
    """Server-sent events of a queued request, which is given up as soon as the caller is gone."""

    def __init__(self, source: AsyncIterator[str], queued: QueuedRequest) -> None:
        super().__init__(source, media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})
        self.queued = queued

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self.queued:
            await super().__call__(scope, receive, send)


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled if the caller goes away before."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, watching = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    both: set[asyncio.Future[Any]] = {task, watching}
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for each in both:
            each.cancel()
        await asyncio.wait(both)


def create_app(
    model: Model, tokenizer: Tokenizer, settings: Settings | None = None, name: str = "dcdm",
    folder: str | None = None,
) -> FastAPI:  # fmt: skip
    """The whole server for a model; `app.state.scheduler` is its queue. Callers are told its `folder`, if any."""
    return create_app_for([ServedModel(model, tokenizer, name, settings or Settings(), folder)])


def create_app_for(several: Sequence[ServedModel]) -> FastAPI:
    """The whole server for models with equal settings and names of their own."""
    check_names([each.name for each in several])
    metrics, settings = Metrics(), several[0].settings
    models = Models(several, metrics)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        for each in models.all:
            each.start()
        yield
        for each in models.all:
            await run_in_threadpool(each.close)

    app = FastAPI(title="dcdm", lifespan=lifespan, openapi_url=None, default_response_class=Response)
    app.state.models, app.state.metrics, app.state.settings = models, metrics, settings
    app.state.served, app.state.scheduler = several[0], models.all[0]
    app.add_middleware(Gate, settings=settings, metrics=metrics)
    _errors(app)
    _pages(app)
    _watching(app)
    _models(app)
    _generation(app)
    return app


def _errors(app: FastAPI) -> None:
    @app.exception_handler(APIError)
    async def refused(request: Request, error: APIError) -> Response:
        request.state.notes["code"] = error.code
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return await refused(request, invalid_body(error))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "invalid_request")
        message = (
            f"{request.method} {request.url.path}: {error.detail}" if error.status_code >= 404 else error.detail
        )
        return await refused(
            request, APIError(error.status_code, message, code=code, headers=dict(error.headers or {}))
        )

    @app.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=499)


def _pages(app: FastAPI) -> None:
    assets = load_assets()

    @app.api_route("/", methods=["GET", "HEAD"])
    async def index() -> Response:
        return await asset(INDEX)

    @app.get("/assets/{name}")
    async def asset(name: str) -> Response:
        if name not in assets:
            raise HTTPException(404)
        content, kind = assets[name]
        return Response(content, media_type=kind, headers={"Cache-Control": "no-cache"})


def load_assets() -> dict[str, tuple[bytes, str]]:
    """Every file of the page by name: its bytes and its content type. Whatever is not in here does not exist."""
    texts = {file.name: file.read_text(encoding="utf-8") for file in ASSETS.iterdir() if file.is_file()}
    texts |= {name: report_asset(name) for name in SHARED}
    texts["palette.css"] = palette_style() + "\n"
    return {
        name: (text.encode(), TYPES[suffix])
        for name, text in texts.items()
        if (suffix := name.rpartition(".")[2]) in TYPES
    }


def _watching(app: FastAPI) -> None:
    models: Models = app.state.models

    @app.head("/healthz")
    @app.get("/healthz")
    async def healthz() -> Response:
        return Json({"status": "ok"}) if models.alive else Json({"status": "a model's thread is gone"}, 503)

    @app.head("/readyz")
    @app.get("/readyz")
    async def readyz() -> Response:
        return Json({"status": "shutting down"}, 503) if models.draining else Json({"status": "ready"})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(app.state.metrics.text(), media_type="text/plain; version=1.0.0; charset=utf-8")


def _models(app: FastAPI) -> None:
    models: Models = app.state.models

    @app.get("/v1/models")
    def listed() -> Response:  # not on the event loop: a card holds examples in the model's tokens
        return Json({"object": "list", "data": [each.served.card() for each in models.all]})

    @app.get("/v1/models/{name:path}")
    def one(name: str) -> Response:
        return Json(models.get(name).served.card())


def _generation(app: FastAPI) -> None:
    models: Models = app.state.models

    async def respond(request: Request, body: OpenAIRequest, prepare: Callable[..., answers.Answer]) -> Response:
        answer = await run_in_threadpool(prepare, models.get(body.model).served, body)
        queued = models.get(body.model).submit(answer.completions)
        if body.stream:
            return EventStream(answer.stream(queued, request.state.notes), queued)
        return Json(await while_connected(request, answer.whole(queued, request.state.notes)))

    @app.post("/v1/completions")
    async def completing(request: Request, body: CompletionRequest) -> Response:
        return await respond(request, body, answers.prepare_completion)

    @app.post("/v1/chat/completions")
    async def chatting(request: Request, body: ChatRequest) -> Response:
        return await respond(request, body, answers.prepare_chat)

    @app.post("/v1/denoise")
    async def denoising(request: Request, body: DenoiseRequest) -> Response:
        scheduler = models.get(body.model)
        completion = await run_in_threadpool(answers.prepare_denoising, scheduler.served, body)
        queued = scheduler.submit([completion])
        return EventStream(answers.stream_denoising(scheduler.served, queued, request.state.notes), queued)
