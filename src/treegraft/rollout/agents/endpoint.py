"""An OpenAI-compatible server on the loopback, in front of an engine.

    program --POST /v1/chat/completions--> this server --token ids--> the engine

A session is one rollout. Its API key is random and ends with it. Each call is recorded with the
token ids that the engine got and gave, so that trees are built from what the model really saw.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import uvicorn
from pydantic import BaseModel, Field, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from treegraft.core.interfaces import Engine, NoiseKey, Serving
from treegraft.core.interfaces import Request as EngineRequest
from treegraft.core.listener import OwnNames, address_of, listen
from treegraft.core.types import Completion, Sampling, StopReason
from treegraft.rollout.limits import Limits

MAX_BODY = 8 << 20
"""Bytes of a request."""
MAX_OPEN = 64
"""Requests of a session at a time."""
MAX_TOOL_SETS = 64
"""Different lists of tools that are remembered."""
KEEP_ALIVE_S = 1_000_000
"""How long an idle connection is held; its client closes it."""
HOST = "127.0.0.1"
MODEL = "policy"


@dataclass(frozen=True, slots=True)
class Call:
    """One completion of a session."""

    context_ids: tuple[int, ...]
    """[tokens] what the engine got."""
    completion: Completion
    message: Mapping[str, Any]
    """What the program got."""
    violation: str | None
    """Which rule of the format it broke; None if it broke none."""
    text: str
    """Of context and completion."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """[tokens] of context and completion."""
        return (*self.context_ids, *self.completion.token_ids)


@dataclass(eq=False)
class Session:
    """One rollout's calls."""

    api_key: str
    noise_key: NoiseKey
    recorded: Sequence[Call] = ()
    """Calls of an earlier rollout. All but the last answer requests that have their contexts; the
    rollout begins to sample in the last one's context."""
    num_asked: int = 0
    """Recorded calls but the last, and requests that reached the engine."""
    num_open: int = 0
    """Requests under way."""
    num_abandoned: int = 0
    """Requests whose client left before the completion."""
    is_over: bool = False
    has_diverged: bool = False
    """A request had another context than those of the recorded calls."""
    give_up: Callable[[], None] = lambda: None
    """Called at that request."""
    limit: StopReason | None = None
    """The limit that a request was refused for."""
    fault: str = ""
    """The engine's failure, if no later request succeeded."""
    results: dict[str, str] = field(default_factory=dict)
    """Texts of tool results, by the id of the call."""
    _calls: dict[int, Call] = field(default_factory=dict)

    @property
    def calls(self) -> tuple[Call, ...]:
        """The recorded calls, in the order in which their requests arrived."""
        return tuple(call for _, call in sorted(self._calls.items()))

    @property
    def has_repeated(self) -> bool:
        """Whether it made all recorded calls but the last, and then one of its own."""
        num_recorded = max(len(self.recorded) - 1, 0)
        num_repeated = sum(number < num_recorded for number in self._calls)
        return num_repeated == num_recorded < len(self._calls)

    def replayed(self, context: tuple[int, ...]) -> int | None:
        """Returns the number of the recorded call that answers a request; None for a request that
        the engine answers.

        Raises:
            _Refused: the request is none that the earlier rollout made.
        """
        # By contexts, since requests of an agent that asks several at a time come in any order.
        for number, call in enumerate(self.recorded[:-1]):
            if number not in self._calls and call.context_ids == context:
                self._calls[number] = call
                return number
        has_begun = self.num_asked >= len(self.recorded)
        if has_begun or context == self.recorded[-1].context_ids:
            return None
        if not self.has_diverged:
            self.has_diverged = True
            self.give_up()
        raise _Refused(409, "the rollout is repeated, and this request is another", "diverged")

    def record(self, ordinal: int, call: Call) -> None:
        """Adds a call, unless the session has ended."""
        if not self.is_over:
            self._calls[ordinal] = call
            self.fault = ""


class _Function(BaseModel):
    name: str = Field(min_length=1, max_length=200)
    description: str = ""
    parameters: dict[str, Any] | None = None


class _Tool(BaseModel):
    type: Literal["function"] = "function"
    function: _Function


class _CalledFunction(BaseModel):
    name: str
    arguments: str | dict[str, Any] = "{}"


class _ToolCall(BaseModel):
    id: str = ""
    type: Literal["function"] = "function"
    function: _CalledFunction


class _Part(BaseModel):
    type: Literal["text"]
    text: str


class _Message(BaseModel):
    role: str = Field(pattern="^(system|developer|user|assistant|tool)$")
    content: str | list[_Part] | None = None
    reasoning_content: str | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[_ToolCall] | None = None

    def for_template(self) -> dict[str, Any]:
        """Returns the message as chat templates read it: content as one text, arguments as
        objects."""
        message = self.model_dump(exclude_none=True)
        content = self.content or ""
        if not isinstance(content, str):
            content = "".join(part.text for part in content)
        message["content"] = content
        for call in message.get("tool_calls", ()):
            with suppress(ValueError, TypeError):
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        return message


class _Asked(BaseModel):
    """A request; what it has beside these fields has no effect."""

    model: str = MODEL
    messages: list[_Message] = Field(min_length=1)
    tools: list[_Tool] = []
    tool_choice: Literal["auto", "none"] | None = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    stop: str | list[str] | None = None
    temperature: float | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    # Another value of these would sample from another distribution than the one that is learned.
    n: Literal[1] | None = None
    top_p: Literal[1] | None = None
    frequency_penalty: Literal[0] | None = None
    presence_penalty: Literal[0] | None = None
    logit_bias: dict[str, float] | None = Field(None, max_length=0)

    @property
    def stops(self) -> tuple[str, ...]:
        """The program's own stop texts."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(filter(None, stops))


class _Refused(Exception):
    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


def _error(status: int, message: str, code: str) -> Response:
    kind = "invalid_request_error" if status < 500 else "server_error"
    body = {"message": message, "type": kind, "param": None, "code": code}
    return JSONResponse({"error": body}, status)


async def _on_refusal(_: Request, error: Exception) -> Response:
    assert isinstance(error, _Refused)
    return _error(error.status, str(error), error.code)


async def _on_http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    hint = "expected POST /v1/chat/completions or GET /v1/models"
    return _error(error.status_code, f"{error.detail}; {hint}", "no_such_route")


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        # Ctrl-C belongs to the run around it.
        yield


class Endpoint:
    """The server and its sessions; it runs in the event loop of its caller."""

    def __init__(
        self,
        engine: Engine,
        format: Serving,
        limits: Limits,
        *,
        temperature: float,
        max_context: int | None = None,
    ) -> None:
        """Args:
        temperature: of the recipe, which requests may name; `limits` has the one of sampling.
        max_context: longest context with its completion, in tokens; None for no limit.
        """
        self._engine = engine
        self._format = format
        self._limits = limits
        self._temperatures = (None, temperature, limits.temperature)
        self._max_context = max_context
        self._sessions: dict[str, Session] = {}
        self._formats: dict[str, Serving] = {}
        self._num_users = 0
        self._num_sessions = 0
        self._stack: list[tuple[_Server, asyncio.Task[None]]] = []
        self.address = ""
        """The base URL while it serves, such as "http://127.0.0.1:4711/v1"."""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Holds the server open; the last of several users at a time closes it."""
        self._num_users += 1
        try:
            if self._num_users == 1:
                self._open()
            yield
        finally:
            self._num_users -= 1
            if not self._num_users:
                server, running = self._stack.pop()
                server.should_exit = True
                await running

    def _open(self) -> None:
        listener = listen(HOST, 0)
        self.address = f"{address_of(listener)}v1"
        config = uvicorn.Config(
            self.app(),
            log_level="critical",
            access_log=False,
            ws="none",
            lifespan="off",
            # By default 5 s: while the loop was busy for longer, agents lost their connections.
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,
        )
        server = _Server(config)
        self._stack.append((server, asyncio.create_task(server.serve(sockets=[listener]))))

    def app(self) -> Starlette:
        """Returns the server as an ASGI application."""
        routes = [
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/models", self._models, methods=["GET"]),
        ]
        return Starlette(
            routes=routes,
            middleware=[Middleware(OwnNames, host=HOST)],
            exception_handlers={_Refused: _on_refusal, HTTPException: _on_http_error},
        )

    @contextmanager
    def session(self, noise_key: NoiseKey, recorded: Sequence[Call] = ()) -> Iterator[Session]:
        """Holds a session; its key is refused afterwards.

        Args:
            noise_key: of the rollout; the number of each call is appended to it.
            recorded: calls of an earlier rollout, which the session repeats up to the last one.
        """
        name = str(self._num_sessions)
        self._num_sessions += 1
        num_repeated = max(len(recorded) - 1, 0)
        key = f"{name}-{secrets.token_urlsafe(24)}"
        session = Session(key, noise_key, recorded, num_asked=num_repeated)
        self._sessions[name] = session
        try:
            yield session
        finally:
            session.is_over = True
            del self._sessions[name]

    # Requests

    def _session_of(self, request: Request) -> Session:
        key = request.headers.get("authorization", "").removeprefix("Bearer ")
        session = self._sessions.get(key.partition("-")[0])
        if session is None or not hmac.compare_digest(session.api_key.encode(), key.encode()):
            raise _Refused(
                401,
                "the API key belongs to no open session; expected that of a rollout under way, as"
                " OPENAI_API_KEY has it",
                "invalid_api_key",
            )
        return session

    async def _models(self, request: Request) -> Response:
        self._session_of(request)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "treegraft"}
        return JSONResponse({"object": "list", "data": [model]})

    async def _chat(self, request: Request) -> Response:
        session = self._session_of(request)
        if session.num_open >= MAX_OPEN:
            raise _Refused(
                429, f"{MAX_OPEN} requests of this session are under way; wait for them", "too_many"
            )
        session.num_open += 1
        try:
            asked = await _read(request)
            return await self._answer(request, session, asked)
        except ClientDisconnect:
            return Response(status_code=499)
        finally:
            session.num_open -= 1

    async def _answer(self, request: Request, session: Session, asked: _Asked) -> Response:
        form, context = self._context(session, asked)
        if (number := session.replayed(context)) is not None:
            return _reply(asked, session.recorded[number], number)
        sampling = self._sampling(session, asked, form, len(context))
        ordinal = session.num_asked
        session.num_asked += 1
        key = (*session.noise_key, ordinal)
        sampled = asyncio.ensure_future(
            self._engine.complete(EngineRequest(context, sampling, noise_key=key))
        )
        try:
            # Cancelled with this request at the server's end too.
            is_there = await _is_done_before_disconnect(sampled, request)
        finally:
            sampled.cancel()
        if not is_there:
            session.num_abandoned += 1
            return Response(status_code=499)
        try:
            completion = sampled.result()
        except Exception as error:
            session.fault = f"{type(error).__name__}: {error}"
            return _error(500, f"the engine failed: {session.fault}", "engine_failed")
        message, violation = form.message(completion.token_ids, ordinal)
        if completion.finish is StopReason.STOP and isinstance(message["content"], str):
            message["content"] = _cut(message["content"], asked.stops)
        text = form.text_of([*context, *completion.token_ids])
        call = Call(context, completion, message, violation, text)
        session.record(ordinal, call)
        return _reply(asked, call, ordinal)

    def _context(self, session: Session, asked: _Asked) -> tuple[Serving, tuple[int, ...]]:
        """The format with the request's tools, and the tokens that the engine gets."""
        messages = [one.for_template() for one in asked.messages]
        tools = [] if asked.tool_choice == "none" else asked.tools
        schemas = [one.model_dump(exclude_none=True) for one in tools]
        name = json.dumps(schemas, sort_keys=True)
        try:
            form = self._formats.get(name) or self._format.with_tools(schemas)
            earlier = ((call.text, call.token_ids) for call in session.calls)
            context = tuple(form.conversation_ids(messages, earlier))
        except Exception as error:  # a template is a program of the model's makers
            raise _Refused(
                400,
                f"the chat template cannot write this conversation: {error}; change the roles of"
                " its messages or its tools",
                "template_refused",
            ) from error
        while len(self._formats) >= MAX_TOOL_SETS:
            del self._formats[next(iter(self._formats))]
        self._formats[name] = form
        for one in messages:
            if one["role"] == "tool":
                session.results[one.get("tool_call_id", "")] = one["content"]
        return form, context

    def _sampling(
        self, session: Session, asked: _Asked, form: Serving, num_context: int
    ) -> Sampling:
        limits = self._limits
        if asked.temperature not in self._temperatures:
            raise _Refused(
                400,
                f"temperature: got {asked.temperature:g}, expected {self._temperatures[1]:g}, the"
                " recipe's, which is the one that is learned; leave it out",
                "temperature_not_of_recipe",
            )
        calls = session.calls
        if len(calls) + session.num_open > limits.max_agent_steps:
            session.limit = StopReason.AGENT_STEPS
            number = limits.max_agent_steps
            text = f"rollout.max_agent_steps = {number} completions are used up; end the rollout"
            raise _Refused(400, text, "step_limit")
        room = limits.max_completion_tokens - sum(len(c.completion.token_ids) for c in calls)
        if self._max_context is not None:
            room = min(room, self._max_context - num_context)
        if room < 1:
            session.limit = StopReason.LENGTH
            raise _Refused(
                400,
                f"no room for a completion: the context has {num_context} tokens, the limit with"
                f" the completion is {self._max_context}, and rollout.max_completion_tokens ="
                f" {limits.max_completion_tokens} of all completions; shorten the context, or end"
                " the rollout",
                "context_length_exceeded",
            )
        wanted = asked.max_completion_tokens or asked.max_tokens or room
        return Sampling(
            max_new_tokens=min(room, wanted),
            temperature=limits.temperature,
            filters=limits.filters,
            stop=(*form.stop, *asked.stops),
            final=form.final,
        )


async def _read(request: Request) -> _Asked:
    """The request's body; refused if it is too long or no such request."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY:
            raise _Refused(413, f"the request has more than {MAX_BODY >> 20} MB", "too_large")
    try:
        return _Asked.model_validate_json(bytes(body))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        raise _Refused(400, f"{where}: {first['msg']}", "invalid_request") from None


async def _is_done_before_disconnect(sampled: asyncio.Future[Any], request: Request) -> bool:
    # After the body, the next message is that the client has left.
    left = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait([sampled, left], return_when=asyncio.FIRST_COMPLETED)
        return sampled.done()
    finally:
        left.cancel()


def _cut(text: str, stops: tuple[str, ...]) -> str:
    places = [text.find(stop) for stop in stops if stop in text]
    return text[: min(places)] if places else text


def _reply(asked: _Asked, call: Call, ordinal: int) -> Response:
    """A recorded call as OpenAI's answer, whole or as server-sent events."""
    finish = "tool_calls" if call.message.get("tool_calls") else "stop"
    if call.completion.finish is StopReason.LENGTH:
        finish = "length"
    num_read, num_written = len(call.context_ids), len(call.completion.token_ids)
    usage = {
        "prompt_tokens": num_read,
        "completion_tokens": num_written,
        "total_tokens": num_read + num_written,
    }
    head = {"id": f"chatcmpl-{ordinal}", "created": int(time.time()), "model": asked.model}
    if not asked.stream:
        choice = {"index": 0, "message": call.message, "finish_reason": finish, "logprobs": None}
        body = {**head, "object": "chat.completion", "choices": [choice], "usage": usage}
        return JSONResponse(body)
    delta = dict(call.message)
    if calls := delta.get("tool_calls"):
        delta["tool_calls"] = [{"index": place, **one} for place, one in enumerate(calls)]
    pieces: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]},
    ]
    if (asked.stream_options or {}).get("include_usage"):
        pieces.append({"choices": [], "usage": usage})
    lines = [json.dumps({**head, "object": "chat.completion.chunk", **one}) for one in pieces]
    events = "".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"])
    return Response(events, media_type="text/event-stream")
