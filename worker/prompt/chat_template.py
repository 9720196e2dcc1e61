"""Exact rendering of messages with a model's own template: its Jinja code in a sandbox, or the tokenizer's code.

Time limit of chat templates: CPython raises an exception in the rendering thread, wherever its code is.
"""

import ctypes
import inspect
import json
import logging
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from queue import SimpleQueue
from typing import Any, Final, TypeVar, cast

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import SandboxedEnvironment
from jinja2.utils import Namespace

from protocol.checkpoint import ChatTemplates
from protocol.failures import Code
from protocol.to_worker import ChatPrompt
from worker.errors import RequestInvalid
from worker.prompt.rewrites import Message, Messages

log = logging.getLogger(__name__)

T = TypeVar("T")

# https://docs.python.org/3/c-api/threads.html#c.PyThreadState_SetAsyncExc
_raise_in_thread: Final = ctypes.pythonapi.PyThreadState_SetAsyncExc
_raise_in_thread.argtypes = (ctypes.c_ulong, ctypes.py_object)
# This null pointer cancels an exception that has not been raised yet.
_NULL: "ctypes.py_object[object]" = ctypes.py_object()


class _TimeLimitExceeded(BaseException):
    """Raised when the limit is exceeded. It is not an `Exception`, which the template's code might catch."""


@dataclass(frozen=True, slots=True, eq=False)
class _LimitedCall:
    """One call of `TimeLimit.run`. The watcher holds the lock while it raises the exception."""

    thread: int
    deadline: float
    lock: threading.Lock = field(default_factory=threading.Lock)


class TimeLimit:
    """Time limit of `limit_s` for renderings in any thread. A Python loop ends at once, a call into C when it returns.

    All renderings have the same limit, so they reach it in the order in which they began. They are not nested.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._begun: SimpleQueue[_LimitedCall] = SimpleQueue()
        self._running: set[_LimitedCall] = set()
        self._starting = threading.Lock()
        self._watcher: threading.Thread | None = None

    def run(self, render: Callable[[], T]) -> T:
        """Return the result of `render`. Raises `RequestInvalid` if it takes too long."""
        self._watch()
        try:
            return self._run(render)
        except _TimeLimitExceeded:
            message = f"the model's chat template took more than {self._limit_s:g} seconds for these messages"
            log.error("%s: their request is refused", message)
            raise RequestInvalid(Code.TEMPLATE_ERROR, message, param="messages") from None

    def _run(self, render: Callable[[], T]) -> T:
        rendering = _LimitedCall(threading.get_ident(), time.monotonic() + self._limit_s)
        self._running.add(rendering)
        self._begun.put(rendering)
        try:
            return render()
        finally:
            # The watcher raises at most one exception per call, and none after it sees this change, so an exception
            # that is raised here belongs to this call.
            self._running.discard(rendering)
            with rendering.lock:
                _raise_in_thread(rendering.thread, _NULL)

    def _watch(self) -> None:
        """Start the watcher at the first call; it never ends."""
        with self._starting:
            if self._watcher is None:
                self._watcher = threading.Thread(target=self._end_late_ones, name="time limit", daemon=True)
                self._watcher.start()

    def _end_late_ones(self) -> None:
        while True:
            rendering = self._begun.get()
            time.sleep(max(0.0, rendering.deadline - time.monotonic()))
            with rendering.lock:
                if rendering in self._running:
                    _raise_in_thread(rendering.thread, _TimeLimitExceeded)


# Time limit of all renderings: a template may loop forever for some messages, and one thread renders all requests of a
# model.
RENDERING: Final = TimeLimit(30.0)


# Errors that template code raises for unexpected messages.
REFUSALS: Final = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError)
# Marks the end of a text that the model continues. Templates strip spaces, so that it ends with one.
_CONTINUED: Final = "CONTINUED-HERE "


class ChatTemplate:
    """Template of a model, which renders exactly the messages and tools that it is given."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.templates = ChatTemplates.of(tokenizer.chat_template)
        # Without templates, the model's chat format is code, which mlx-lm's wrapper calls.
        self.is_code = not self.templates.names
        # FireFunction's template needs its tools as text, and the current time.
        self._wants_functions = self.mentions("functions") and not self.mentions("tools")
        self.may_take_tools = self.is_code or self.mentions("tools") or self._wants_functions
        self._special_tokens: dict[str, Any] = dict(tokenizer.special_tokens_map)

    def mentions(self, name: str) -> bool:
        """Return whether the template uses this variable or field."""
        return any(re.search(rf"\b{name}\b", text) for text in self.templates.texts)

    def render(
        self, messages: Messages, tools: Sequence[Message] | None, prompt: ChatPrompt, *, opens: bool, has_tools: bool
    ) -> str:
        """Render the messages. Raises the errors of the template's code.

        The prompt has the options. `opens` adds the beginning of an answer; `has_tools` chooses the template for tools.
        """
        variables = {**thinking_variables(prompt), **prompt.template_kwargs}
        if self._wants_functions:
            variables = {**_functions(prompt), **variables}
        if self.is_code:
            return self._render_in_code(messages, tools, opens, prompt.continue_final, variables)
        template = self.templates.with_tools if has_tools else self.templates.plain
        if not template:
            names = ", ".join(self.templates.names)
            raise TemplateError(f"none of its templates ({names}) is the default; set chat_template in mlxd.toml")
        if template != self.templates.plain:
            tools = prompt.tools  # Never None, because a template for tools may iterate over them unconditionally.
        messages = _copied(messages)
        if prompt.continue_final:
            messages[-1]["content"] = _ended(messages[-1].get("content"))
        variables = {"documents": None, **_copied({**self._special_tokens, **variables})}
        text = compiled(template).render(
            messages=messages, tools=_copied(tools), add_generation_prompt=opens, **variables
        )
        return _cut(text) if prompt.continue_final else text

    def _render_in_code(
        self, messages: Messages, tools: Any, opens: bool, continues: bool, variables: dict[str, Any]
    ) -> str:
        accepted = inspect.signature(self._tokenizer.apply_chat_template).parameters
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values()):
            variables = {name: value for name, value in variables.items() if name in accepted}
        return str(
            self._tokenizer.apply_chat_template(
                messages,
                tools=tools,
                tokenize=False,
                add_generation_prompt=opens,
                continue_final_message=continues,
                **variables,
            )
        )


def thinking_variables(prompt: ChatPrompt) -> dict[str, Any]:
    """Return the thinking options under all variable names that templates use; a template ignores unknown names."""
    variables: dict[str, Any] = {}
    if prompt.thinking is not None:
        variables |= {"enable_thinking": prompt.thinking, "thinking": prompt.thinking}
    if prompt.effort:
        variables["reasoning_effort"] = prompt.effort
    return variables


@lru_cache(maxsize=16)
def compiled(template: str) -> Template:
    """Compile a template for the sandbox, with the filters and functions that transformers gives to chat templates.

    Unlike in transformers, templates may change lists and objects (Kimi K2's keep a queue of ids): all that they get is
    a copy for one rendering. Raises `TemplateSyntaxError`.
    """
    sandbox = SandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols], cache_size=0
    )
    sandbox.filters["tojson"] = _to_json
    functions: dict[str, Any] = {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _new_dict,
        "namespace": _TemplateNamespace,
    }
    cast("dict[str, Any]", sandbox.globals).update(functions)
    return sandbox.from_string(template)


class _GenerationTag(Extension):
    """Tag `generation` around the answers of a chat, which training uses; it renders what it contains."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's name and type

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_contents"), [], [], body).set_lineno(line)

    def _contents(self, caller: Callable[[], str]) -> str:
        return caller()


class _TemplateNamespace(Namespace):
    """Namespace without names that begin with an underscore, because Python gives these a meaning."""

    def __init__(*args: Any, **values: Any) -> None:
        # Jinja's signature, so that `namespace(self=…)` is possible.
        self, *given = args
        values = dict(*given, **values)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: str) -> None:
    if name.startswith("_"):
        raise SecurityError(f"a namespace cannot have an attribute {name!r}")


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Return JSON; Jinja's own filter escapes characters of HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: Any) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def _new_dict(*args: Any, **members: Any) -> dict[Any, Any]:
    # The type itself would give templates its methods and base classes.
    return dict(*args, **members)


def _copied(value: Any) -> Any:
    """Copy JSON data; all other values become their text."""
    match value:
        case str() | int() | float() | bool() | None:
            return value
        case Mapping():
            return {key: _copied(member) for key, member in cast("Mapping[Any, Any]", value).items()}
        case list() | tuple():
            return [_copied(member) for member in cast("Sequence[Any]", value)]
        case _:
            return str(value)


def _ended(content: Any) -> Any:
    """Return a content with the mark at the end of its last text. Raises `ValueError` if it has none."""
    if isinstance(content, str):
        return content + _CONTINUED
    parts = cast("list[Message]", content["blocks"] if isinstance(content, dict) else content or [])
    last = next((at for at in reversed(range(len(parts))) if "text" in parts[at]), None)
    if last is None:
        raise ValueError("the last message has no text to continue")
    parts[last] = {**parts[last], "text": parts[last]["text"] + _CONTINUED}
    return content


def _cut(text: str) -> str:
    """Cut the rendering at the mark. Raises `ValueError` if the template dropped it."""
    at = text.rfind(_CONTINUED.strip())
    if at < 0:
        raise ValueError("the template does not render the end of the message to continue")
    # Without its space, the text before the mark may have been stripped if it had no mark.
    return text[:at] if text.startswith(_CONTINUED, at) else text[:at].rstrip()


def _functions(prompt: ChatPrompt) -> dict[str, Any]:
    """Return the variables that FireFunction's model card names. The date has no time, so that equal chats have equal
    prompts all day."""
    specs = [tool["function"] for tool in prompt.tools]
    return {"functions": json.dumps(specs, indent=4, ensure_ascii=False), "datetime": f"{datetime.now(UTC):%Y-%m-%d}"}
