"""Runs one request on an engine in this process: streams the answer and measures its times."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import monotonic
from types import FrameType
from typing import TYPE_CHECKING

from twostroke.commands.terminal import WordWriter, columns
from twostroke.config import EngineConfig
from twostroke.errors import EngineError
from twostroke.kv.usage import KVUsage
from twostroke.observe.record import Records, RequestRecord
from twostroke.request import SamplingParams

if TYPE_CHECKING:
    from twostroke.engine.build import Engine
    from twostroke.engine.input_processor import Prompt
    from twostroke.outputs import RequestOutput

# A model's text may contain escape sequences, so control characters are not sent to a terminal.
CONTROL = dict.fromkeys([*range(32), *range(127, 160)]) | {ord("\n"): "\n", ord("\t"): "\t"}


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer with its times. A time is None if too few tokens were generated to measure it."""

    text: str
    token_ids: list[int]
    prompt_token_ids: list[int]
    finish_reason: str  # abort: the user interrupted the answer
    stop_reason: int | str | None
    prompt_tokens: int
    cached_tokens: int  # of the prompt
    queue_s: float
    prefill_s: float | None
    decode_s: float | None
    ttft_s: float | None  # measured by the caller, from the request to the first text
    tpot_s: float | None
    kv: KVUsage  # at the step with the highest use

    @property
    def prefilled_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens

    @property
    def prefill_tokens_per_s(self) -> float | None:
        return self.prefilled_tokens / self.prefill_s if self.prefill_s else None

    @property
    def decode_tokens_per_s(self) -> float | None:
        return 1 / self.tpot_s if self.tpot_s else None


def load(config: EngineConfig, for_chat: bool = True) -> tuple[Engine, float]:
    """Return an engine and the seconds that its start took, with imports. On a terminal, print the
    progress. `for_chat`: start the process for chat templates while the model is loaded."""
    started = monotonic()
    show = sys.stderr.isatty()
    if show:
        from twostroke.model.find.packaged import DEFAULT_MODEL

        print(f"loading {config.model or DEFAULT_MODEL.name}", file=sys.stderr, flush=True)
    from twostroke.engine.build import build_engine

    renderer = None
    if for_chat:
        from twostroke.engine.rendering import TemplateRenderer

        renderer = TemplateRenderer()
        renderer.start()
    engine = build_engine(config, renderer)
    load_s = monotonic() - started
    if show:
        tokens = engine.core.scheduler.kv.usage().reserved
        print(
            f"ready in {load_s:.1f} s, KV cache {tokens:,} tokens\n",
            file=sys.stderr,
            flush=True,
        )
    return engine, load_s


def has_chat_template(engine: Engine) -> bool:
    tokenizer = engine.input_processor.tokenizer
    own = None if tokenizer is None else tokenizer.chat_template
    return (engine.config.chat_template or own) is not None


def run_request(
    engine: Engine,
    prompt: Prompt,
    params: SamplingParams,
    write: Callable[[str], None],
    start_s: float,
    interrupted: Callable[[], bool],
) -> Answer:
    """Run one request alone. `write` gets the text of each step. If `interrupted` returns True, the
    answer ends with the finish reason "abort". `start_s`: the time of the request.
    """
    from twostroke.engine.in_process import SyncClient

    client, records = SyncClient(engine), engine.core.records
    first_step = records.steps[-1].step + 1 if records.steps else 0
    request_id = client.add(prompt, params)
    output: RequestOutput | None = None
    written, first_text_s = 0, None
    try:
        for changed in client.run([request_id]):
            for output in changed:
                if output.error:
                    raise EngineError(output.error)
                text = output.outputs[0].text[written:]
                if text and first_text_s is None:
                    first_text_s = monotonic()
                written += len(text)
                write(text)
            if interrupted():
                break
    finally:
        client.abort(request_id)
    ttft_s = None if first_text_s is None else first_text_s - start_s
    return _answer(output, _record(records, request_id), ttft_s, _most_used(records, first_step))


@contextlib.contextmanager
def deferred_interrupts() -> Iterator[Callable[[], bool]]:
    """Let the first Ctrl-C only set a flag, so that a step is completed. A second Ctrl-C interrupts
    as usual. Yield a function that returns the flag."""
    seen = False

    def set_flag(number: int, frame: FrameType | None) -> None:
        nonlocal seen
        seen = True
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, set_flag)
    try:
        yield lambda: seen
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def answer_printer() -> Iterator[Callable[[str], None]]:
    """Yield a function that prints parts of a text. At a terminal it leaves out control characters
    and breaks no word at the edge."""
    width = columns(sys.stdout)
    if width is None:
        yield lambda text: print(text, end="", flush=True)
        return
    words = WordWriter(sys.stdout, width)
    try:
        yield lambda text: words.write(text.translate(CONTROL))
    finally:
        words.flush()


def _record(records: Records, request_id: str) -> RequestRecord:
    return next(record for record in reversed(records.requests) if record.request_id == request_id)


def _most_used(records: Records, first_step: int) -> KVUsage:
    """Return the highest use in the steps of the run: after the last step all blocks are free."""
    usages = [record.kv for record in records.steps if record.step >= first_step]
    return max(usages, key=lambda usage: usage.used)


def _answer(
    output: RequestOutput | None, record: RequestRecord, ttft_s: float | None, kv: KVUsage
) -> Answer:
    completion = None if output is None else output.outputs[0]
    has_decode = len(record.token_s) > 1
    return Answer(
        text="" if completion is None else completion.text,
        token_ids=[] if completion is None else completion.token_ids,
        prompt_token_ids=[] if output is None else output.prompt_token_ids,
        finish_reason=(completion and completion.finish_reason) or "abort",
        stop_reason=None if completion is None else completion.stop_reason,
        prompt_tokens=record.num_prompt,
        cached_tokens=record.num_cached,
        queue_s=record.queue_s,
        prefill_s=record.prefill_s if record.token_s else None,
        decode_s=record.decode_s if has_decode else None,
        ttft_s=ttft_s,
        tpot_s=record.tpot_s if has_decode else None,
        kv=kv,
    )
