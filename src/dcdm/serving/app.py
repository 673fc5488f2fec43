"""The application: its routes, errors in one form, and the playground's files."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import version
from importlib.resources import files
from typing import Any, TypeVar

from anyio import CapacityLimiter, fail_after, to_thread
from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import PlainTextResponse, Response

from dcdm.data.tokenizers import Tokenizer
from dcdm.model.transformer import Model
from dcdm.serving import denoise
from dcdm.serving.access import Gate
from dcdm.serving.completions import Answer, PreparedRequest, prepare_chat, prepare_completion
from dcdm.serving.monitoring import Metrics
from dcdm.serving.scheduler import Models
from dcdm.serving.schemas import (
    APIError,
    ChatRequest,
    CompletionRequest,
    DenoiseRequest,
    ErrorBody,
    Generating,
    OpenAIRequest,
    invalid_body,
    queue_full,
)
from dcdm.serving.served import Served, Settings
from dcdm.serving.streaming import EventStream, Json, while_connected
from dcdm.viewing.pages import asset as report_asset
from dcdm.viewing.pages import palette_style

T = TypeVar("T")
ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorBody, "description": "Something in the request is wrong; `param` names it."},
    401: {"model": ErrorBody, "description": "No key, or a wrong one."},
    403: {"model": ErrorBody, "description": "A host name that is not answered without a key."},
    404: {"model": ErrorBody, "description": "No such model or route."},
    408: {"model": ErrorBody, "description": "Body or result took too long."},
    413: {"model": ErrorBody, "description": "The body is too large."},
    415: {"model": ErrorBody, "description": "The body is not application/json."},
    429: {"model": ErrorBody, "description": "Too many requests wait; Retry-After says when to come again."},
    503: {"model": ErrorBody, "description": "The server is shutting down, or too many requests are open."},
}
OBJECT = {"application/json": {"schema": {"type": "object"}}}
STATUS: dict[int | str, dict[str, Any]] = {
    200: {"description": "Yes.", "content": OBJECT}, 503: {"description": "No.", "content": OBJECT}
}  # fmt: skip
CARD: dict[int | str, dict[str, Any]] = {
    **ERRORS, 200: {"description": "OpenAI's object, with more under `dcdm`.", "content": OBJECT}
}  # fmt: skip
EVENT = {"type": "object", "properties": {"event": {"type": "string"}, "data": {"type": "string"}}}
EVENTS: dict[str, Any] = {
    "content": {"text/event-stream": {"schema": EVENT}},
    "description": "Server-sent events.",
}
ANSWERS: dict[int | str, dict[str, Any]] = {
    **ERRORS,
    200: {
        "description": "OpenAI's object; with `stream`, server-sent events of its chunks.",
        "content": {**OBJECT, **EVENTS["content"]},
    },
}
THREADS = 4
"""That make automata, and as many that render chats."""
THREAD_SECONDS = 20.0
"""How long work may wait for a thread."""
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


class Workers:
    """Threads for work that one request can make long, so that it delays only others who want the same.

    Only so many may wait for them; more are told to come again.
    """

    def __init__(self, threads: int, most: int) -> None:
        self._threads, self._most = CapacityLimiter(threads), most

    async def run(self, work: Callable[..., T], *given: object) -> T:
        if self._threads.statistics().tasks_waiting >= self._most:
            raise queue_full()
        turn = object()
        try:
            with fail_after(THREAD_SECONDS):
                await self._threads.acquire_on_behalf_of(turn)
        except TimeoutError:
            raise queue_full() from None
        try:
            return await to_thread.run_sync(work, *given, limiter=CapacityLimiter(1))  # its turn has come already
        finally:
            self._threads.release_on_behalf_of(turn)


def create_app(
    model: Model, tokenizer: Tokenizer, settings: Settings | None = None, name: str = "dcdm",
    folder: str | None = None,
) -> FastAPI:  # fmt: skip
    """The whole server for a model; `app.state.scheduler` is its queue. Callers are told its `folder`, if any."""
    return create_app_for([Served(model, tokenizer, name, settings or Settings(), folder)])


def create_app_for(several: Sequence[Served]) -> FastAPI:
    """The whole server for models with equal settings."""
    metrics, settings = Metrics(), several[0].settings
    models = Models(several, metrics)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        models.start()
        yield
        await run_in_threadpool(models.close)

    app = FastAPI(
        title="dcdm", version=version("dcdm"), description="A block diffusion language model behind HTTP.",
        lifespan=lifespan, docs_url=None, redoc_url=None, default_response_class=Response,
    )  # fmt: skip
    app.state.models, app.state.metrics = models, metrics
    app.state.served, app.state.scheduler = models.first.served, models.first
    app.add_middleware(Gate, settings=settings, metrics=metrics)
    _errors(app)
    _pages(app)
    _watching(app)
    _models(app)
    _generation(app)
    _without_422(app)
    return app


def _errors(app: FastAPI) -> None:
    @app.exception_handler(APIError)
    async def refused(request: Request, error: APIError) -> Response:
        request.state.notes["code"] = error.code
        return Json(error.body(), error.status, error.headers)

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

    @app.head("/", include_in_schema=False)
    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return _asset(INDEX)

    @app.get("/assets/{name}", include_in_schema=False)
    async def asset(name: str) -> Response:
        return _asset(name)

    def _asset(name: str) -> Response:
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

    @app.head("/healthz", include_in_schema=False)
    @app.get("/healthz", summary="Whether the server lives", responses=STATUS)
    async def healthz() -> Response:
        return Json({"status": "ok"}) if models.alive else Json({"status": "a model's thread is gone"}, 503)

    @app.head("/readyz", include_in_schema=False)
    @app.get("/readyz", summary="Whether the server takes requests", responses=STATUS)
    async def readyz() -> Response:
        return Json({"status": "shutting down"}, 503) if models.draining else Json({"status": "ready"})

    @app.get("/metrics", summary="Figures for Prometheus", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return Response(app.state.metrics.text(), media_type="text/plain; version=1.0.0; charset=utf-8")


def _models(app: FastAPI) -> None:
    served: Models = app.state.models

    @app.get("/v1/models", summary="The served models", responses=CARD)
    async def models() -> Response:
        return Json({"object": "list", "data": [each.served.card() for each in served.schedulers.values()]})

    @app.get("/v1/models/{name:path}", summary="A served model by its name", responses=CARD)
    async def one(name: str) -> Response:
        return Json(served.get(name).served.card())


def _generation(app: FastAPI) -> None:
    models: Models = app.state.models
    most = models.first.served.settings.max_queued
    compiling, rendering = Workers(THREADS, most), Workers(THREADS, most)

    def workers_for(body: Generating) -> Callable[..., Awaitable[Any]]:
        """Who prepares a request: automata and chats may take seconds, the rest does not."""
        if body.response_format is not None and body.response_format.type != "text":
            return compiling.run
        return rendering.run if isinstance(body, ChatRequest) else run_in_threadpool

    async def answer(
        request: Request, body: OpenAIRequest, prepare: Callable[[Served], PreparedRequest]
    ) -> Response:
        scheduler = models.get(body.model)
        prepared = await workers_for(body)(prepare, scheduler.served)
        queued = scheduler.submit(prepared.rows, caller_of(request, body.user))
        answer = Answer(scheduler.served, prepared, queued, request.state.notes)
        if prepared.stream:
            return EventStream(answer.stream(), queued)
        with queued:
            return Json(await while_connected(request, answer.whole()))

    @app.post("/v1/completions", summary="Complete texts", responses=ANSWERS)
    async def completing(request: Request, body: CompletionRequest) -> Response:
        return await answer(request, body, lambda served: prepare_completion(served, body))

    @app.post("/v1/chat/completions", summary="Answer in a chat", responses=ANSWERS)
    async def chatting(request: Request, body: ChatRequest) -> Response:
        return await answer(request, body, lambda served: prepare_chat(served, body))

    @app.post("/v1/denoise", summary="A canvas being filled, step by step", responses={**ERRORS, 200: EVENTS})
    async def denoising(request: Request, body: DenoiseRequest) -> Response:
        scheduler = models.get(body.model)
        row = await workers_for(body)(denoise.prepare_denoising, scheduler.served, body)
        queued = scheduler.submit([row], caller_of(request))
        return EventStream(denoise.stream(scheduler.served, queued, request.state.notes), queued)


def caller_of(request: Request, user: str | None = None) -> str:
    """Fair-queue key: the caller's address, and the user that it names."""
    return f"{request.client.host if request.client else ''} {user or ''}"


def _without_422(app: FastAPI) -> None:
    """Our own errors are 400; FastAPI would describe its own."""
    describe = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            for path in describe()["paths"].values():
                for operation in path.values():
                    operation["responses"].pop("422", None)
        assert app.openapi_schema is not None
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
